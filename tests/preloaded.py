"""What nearly every rank needs, imported once by the server that ranks are forked from."""

import gc

import iris.device  # noqa: F401
import iris_ops.torch_ops  # noqa: F401
import layers  # noqa: F401
import torch.distributed.tensor  # noqa: F401  # `torch.testing` asks of all that it compares whether it is a DTensor

import tests.harness  # noqa: F401

gc.freeze()  # ranks need not look through it for garbage
