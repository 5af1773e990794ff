"""How a segment of memory becomes visible to every rank."""

from .base import Segment, map_segment

__all__ = ["Segment", "map_segment"]
