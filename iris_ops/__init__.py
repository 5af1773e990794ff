"""Matrix products fused with their collectives, each one persistent Triton kernel. Reached as `ctx.ops`."""

from .activation import Activation
from .config import FusedConfig, Prediction
from .moe.scoring import Scoring

__all__ = ["Activation", "FusedConfig", "Prediction", "Scoring"]
