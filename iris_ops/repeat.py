"""Launching again what was launched before: `iris/repeat.py`."""

from iris.repeat import address, prepare

__all__ = ["address", "prepare"]
