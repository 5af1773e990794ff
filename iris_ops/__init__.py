"""Matrix products fused with their collectives, each one persistent Triton kernel. Reached as `ctx.ops`."""

from .config import FusedConfig, Prediction
from .moe.activation import Activation
from .moe.scoring import Scoring

__all__ = ["Activation", "FusedConfig", "Prediction", "Scoring"]
