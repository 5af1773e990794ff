"""Triton only: remote memory access, synchronisation, and the device context that carries both.

A user's kernel takes what it calls from `iris` itself (`iris.load`, `iris.DeviceContext`, ...), and signals and waits
from `iris.device.sync`.
"""
