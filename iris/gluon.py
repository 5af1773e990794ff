"""`iris.experimental.iris_gluon` under the name that code written for ROCm/iris imports."""

from .experimental.iris_gluon import Iris, IrisDeviceCtx, iris

__all__ = ["Iris", "IrisDeviceCtx", "iris"]
