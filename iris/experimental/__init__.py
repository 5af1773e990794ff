"""Interfaces that may still change: device contexts for other languages than Triton."""
