"""Torch's product with a collective after it, or overlapped with copy engines."""
