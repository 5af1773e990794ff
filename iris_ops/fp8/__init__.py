"""Weights in eight bits: how they are rounded, and the kernels that multiply them."""
