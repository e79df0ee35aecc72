"""The method "blend" of `select`: a hierarchical model of rectified shapes, and today's losses."""

from .posterior import drawn, forecast

__all__ = ["drawn", "forecast"]
