"""Messages under the names that code written for ROCm/iris imports."""

from .messages import P2POp, P2PState, irecv, isend

__all__ = ["P2POp", "P2PState", "irecv", "isend"]
