"""`FusedConfig`, where code written for ROCm/iris imports it from."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "FusedConfig":
        raise AttributeError(f"module 'iris.ops.config' has no attribute {name!r}")
    from iris_ops.config import FusedConfig

    return FusedConfig
