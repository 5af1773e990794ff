"""Matrix products fused with their collectives, each one persistent Triton kernel. Reached as `ctx.ops`."""

from .config import FusedConfig, Prediction

__all__ = ["FusedConfig", "Prediction"]
