"""Placeholder."""
class TensorMethods:
    pass
