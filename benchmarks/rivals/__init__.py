"""Contenders for a fused op: ours, the rivals, each in the module of its library, and the product alone."""
