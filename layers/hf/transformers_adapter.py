"""Use our layers inside transformers' own tensor-parallel loading.

    with layers.fused_styles(ctx):
        plan = DistributedConfig(tp_plan="auto")
        model = AutoModelForCausalLM.from_pretrained(path, distributed_config=plan)

While the block runs, transformers' registry of parallel styles returns ours where a style splits a Linear. The
original style still places the parameters (each rank loads its part as a DTensor, and saves it so); ours only
installs the forward: a layer of `linear` that works on the rank's local tensors. A loaded model keeps its
forward; the registry is restored when the block ends.

`layers.from_pretrained` needs none of this, and splits what transformers refuses (heads that the ranks do not divide).
This is for programs that must keep loading by transformers. Needs a transformers whose styles place
DTensors and install forwards, from 5.16.1 on: an older one is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from iris.errors import ArgumentError, PlatformError, ShapeError, StyleError
import torch
from torch import nn

from ..linear import ColumnParallelLinear, RowParallelLinear
from ..sharded import ShardedLinear, ranks_of
from .styles import COLUMN, GATHERED, ROW, ROW_SPLIT

if TYPE_CHECKING:
    from iris.context import Iris


@contextmanager
def fused_styles(ctx: Iris) -> Iterator[None]:
    """Replace transformers' tensor-parallel linear layers by ours, for models that are loaded in the block.

    Args:
        ctx: a context of the ranks that transformers splits over: all of them, or its mesh's "tp" dimension.

    Returns:
        A context manager.

    Raises:
        PlatformError: if this transformers has no registry of styles.
        StyleError: while loading, for a module that is no `torch.nn.Linear`.
        ArgumentError: while loading, for another set of ranks.
    """
    ctx = ranks_of(ctx)
    registry = _registry()
    replaced = {name: registry[name] for name in COLUMN | GATHERED | ROW | ROW_SPLIT if name in registry}
    for name, original in replaced.items():
        registry.register(name, _FusedStyle(name, original, ctx))
    try:
        yield
    finally:
        for name, original in replaced.items():
            registry.register(name, original)


def _registry() -> Any:
    try:
        from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES as registry
    except ImportError as error:
        raise PlatformError(f"transformers' tensor parallelism is missing: {error}") from None
    if not hasattr(registry["rowwise"], "install_forward"):
        import transformers

        raise PlatformError(
            f"transformers is {transformers.__version__}, whose styles do not place DTensors: expected 5.16.1 or"
            " newer, or use layers.from_pretrained"
        )
    return registry


class _FusedStyle:
    """A style of transformers' registry: the original's parameters, our forward."""

    def __init__(self, name: str, original: Any, ctx: Iris) -> None:
        self._name, self._original, self._ctx = name, original, ctx

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def validate_param(self, *_: Any, **__: Any) -> None:
        """Do nothing: ours gathers uneven parts, which older versions of the original refuse."""

    def install_forward(self, module: Any, mesh: Any) -> nn.Module:
        if type(module) is not nn.Linear:
            raise StyleError(f"module is a {type(module).__name__}: style {self._name!r} splits a torch.nn.Linear only")
        here, given = (self._ctx.cur_rank, self._ctx.num_ranks), (mesh.get_local_rank(), mesh.size())
        if here != given:
            raise ArgumentError(
                f"ctx is rank {here[0]} of {here[1]}, transformers splits as rank {given[0]} of {given[1]}: expected"
                " the same ranks; pass iris.iris(group=mesh['tp'])"
            )
        vars(module).update(forward=_Forward(module, self._layer(module)))
        return module

    def _layer(self, linear: nn.Linear) -> ShardedLinear:
        sizes = (linear.in_features, linear.out_features, linear.bias is not None)
        like: dict[str, Any] = {"ctx": self._ctx, "dtype": linear.weight.dtype, "device": "meta"}
        if self._name in COLUMN | GATHERED:
            return ColumnParallelLinear(*sizes, gather_output=self._name in GATHERED, **like)
        return RowParallelLinear(*sizes, input_is_parallel=self._name in ROW, **like)


class _Forward:
    """The forward of `linear`, whose parameters are DTensors, by `layer`, which uses their local tensors."""

    def __init__(self, linear: nn.Linear, layer: ShardedLinear) -> None:
        self._linear, self._layer = linear, layer
        self._weight: torch.Tensor | None = None

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        weight = self._linear.weight
        if weight.requires_grad and torch.is_grad_enabled():
            raise ArgumentError("weight requires grad, and fused layers have no backward: call under torch.no_grad()")
        if _local(weight) is not self._weight:  # loaded or converted since the last call
            self._borrow()
        return self._layer(input)

    def _borrow(self) -> None:
        for name, parameter in self._linear.named_parameters(recurse=False):
            local, expected = _local(parameter), getattr(self._layer, name).shape
            if local.shape != expected:
                raise ShapeError(f"{name} has {tuple(local.shape)} on this rank: expected {tuple(expected)}")
            setattr(self._layer, name, nn.Parameter(local.detach(), requires_grad=False))
        self._weight = _local(self._linear.weight)


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter
