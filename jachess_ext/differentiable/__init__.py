"""Torch's own derivatives of unmodified programs, where torch refuses them or is wrong."""
