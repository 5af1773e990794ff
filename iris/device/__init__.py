"""Triton only: remote memory access, synchronisation, and the device context that carries both."""

from .context import DeviceContext
from .rma import (
    atomic_add,
    atomic_and,
    atomic_cas,
    atomic_max,
    atomic_min,
    atomic_or,
    atomic_xchg,
    atomic_xor,
    copy,
    get,
    load,
    put,
    store,
)

__all__ = [
    "DeviceContext",
    "atomic_add",
    "atomic_and",
    "atomic_cas",
    "atomic_max",
    "atomic_min",
    "atomic_or",
    "atomic_xchg",
    "atomic_xor",
    "copy",
    "get",
    "load",
    "put",
    "store",
]
