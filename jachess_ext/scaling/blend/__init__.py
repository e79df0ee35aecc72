"""The method "blend" of `select`: a hierarchical model of rectified shapes, and today's losses."""

from .posterior import cautious, forecast

__all__ = ["cautious", "forecast"]
