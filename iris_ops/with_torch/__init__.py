"""Torch's product with a collective after it, or with copy engines beside it."""
