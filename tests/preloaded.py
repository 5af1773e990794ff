"""What nearly every rank needs, imported once by the server that ranks are forked from."""

import gc
import sys

import iris.device  # noqa: F401
import iris_ops.torch_ops  # noqa: F401
import layers  # noqa: F401
import torch._dynamo  # noqa: F401
import torch.distributed.tensor  # noqa: F401  # `torch.testing` asks of all that it compares whether it is a DTensor
from triton.runtime.interpreter import InterpretedFunction

import tests.harness  # noqa: F401

for module in [module for name, module in sys.modules.items() if name.startswith(("iris.", "iris_ops."))]:
    for each in list(vars(module).values()):
        if isinstance(each, InterpretedFunction):
            each.rewrite()  # 10 ms, which a rank would spend at its first call
gc.freeze()  # ranks need not look through it for garbage
