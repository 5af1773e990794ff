"""Import what every rank needs, once, in the server that ranks are forked from (`launch.py`).

iris comes before transformers, which imports triton: it may set up the interpreter.
"""

import atexit
import gc
import os

import iris.device  # noqa: F401
import iris_ops.torch_ops  # noqa: F401
import layers  # noqa: F401
import torch._dynamo  # noqa: F401
import torch.distributed.tensor  # noqa: F401

atexit.register(os._exit, 0)  # nanobind would print what triton still holds when Python ends
gc.collect()
gc.freeze()  # ranks need not look through it for garbage, nor copy the memory that it lies in
