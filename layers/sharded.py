"""The base of every split linear: one weight split along one dimension, its loading, and the checks of its input.

The split is data. `parts` holds one `Shard` for each output that the weight fuses (one for a plain linear; q, k and v,
or gate and up, for a fused one), and `dim` says which dimension of the weight they split. No method checks the class.

`load_shard(name, source)` fills a parameter from the full tensor, or from a safetensors slice of it, and reads this
rank's shard only. A layer built on "meta" allocates when it is loaded, not before. Weights hold no gradient: the layers
are for inference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from iris.all_hosts import AllHosts
from iris.errors import ArgumentError, DeviceError, DtypeError, ShapeError
from iris_ops import torch_ops
from iris_ops.local import matmul, skinny_matmul
from iris_ops.recording import row_count
import torch
from torch import nn

from .autocast import autocast, autocast_dtype
from .gradients import check_no_gradient, may_differentiate
from .ordered_storage import Ordered
from .shard import Shard, Transposed, concat, fill, merged
from .weight_storage import IN_DTYPE, Form, InDtype, Quantised

if TYPE_CHECKING:
    from iris.context import Iris
    from typing_extensions import Self


class ShardedLinear(nn.Module):
    """A linear layer that holds this rank's part of W [out_features, in_features]; `dim` 0 splits outputs, 1 inputs."""

    dim: int
    op: str  # the op of forward, for reports
    sequence_parallel: bool
    stored_transposed = False  # whether checkpoints have its weight as [in_features, out_features]
    own_steps = True  # whether `skinny_matmul` runs products of few rows without an exchange, where that is faster

    def __init__(
        self, in_features: int, out_features: int, bias: bool, parts: tuple[Shard, ...], ctx: Iris,
        dtype: torch.dtype | None, device: torch.device | str | None,
    ):  # fmt: skip
        super().__init__()
        positive(in_features=in_features, out_features=out_features)
        placed = device_of(dtype, device, ctx)
        shard, full_size = concat(parts), (out_features, in_features)
        if shard.total != full_size[self.dim]:
            raise ShapeError(f"parts split {shard.total} features: expected {full_size[self.dim]}, all of the layer's")
        self.in_features, self.out_features, self.ctx, self.parts = in_features, out_features, ctx, parts
        self._device_type = ctx.device.type  # reading a device's type takes half a microsecond
        even = shard.size * ctx.num_ranks == shard.total
        mean = None if even else -(-shard.total // ctx.num_ranks)
        local = (shard.size, in_features) if self.dim == 0 else (out_features, shard.size)
        self.local_shape = local  # of the numbers of this rank's weight, however they are stored
        like: dict[str, Any] = {"dtype": dtype, "device": placed}
        self.weight = nn.Parameter(torch.empty(local, **like), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(local[0], **like), requires_grad=False) if bias else None
        self.rows_alike = ctx.level.rows_alike
        """Whether a row has the same bits among any number of rows."""
        self.across_ranks = torch_ops.Parts(mean, self._k_per_rank() if self.dim == 1 else None)
        self.own_steps = self.may_step = type(self).own_steps and not self.rows_alike
        self.weight_scale: nn.Parameter | None = None  # of a storage that has scales
        self.weight_order: nn.Parameter | None = None  # of one that has columns in another order
        self.storage: InDtype = IN_DTYPE
        if not self.weight.is_meta:
            self.reset_parameters()

    def _k_per_rank(self) -> tuple[int, ...] | None:
        """Return how many inputs each rank has, where the context's level of equal bits needs it."""
        (first, *others), alone = self.parts, self.ctx.num_ranks == 1
        shares = () if others else first.rank_sizes or (first.size,) * alone
        return self.ctx.level.k_per_rank(f"a layer of {self.in_features} inputs", shares, self.ctx.num_ranks)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of inputs and outputs: the weight's own unless that is fp8."""
        return self.storage.dtype(self.weight)

    @property
    def local_weight(self) -> torch.Tensor:
        """Return what this rank's products multiply by, as it is stored."""
        return self.weight

    @property
    def served_by(self) -> str:
        """Return the op of forward, for reports."""
        return self.op

    def reset_parameters(self) -> None:
        """Draw the local part of a fresh weight at torch.nn.Linear's scale. Padding and bias are zero."""
        bound = self.in_features**-0.5
        nn.init.uniform_(self.weight, -bound, bound)
        pad = self.parts[-1].pad
        self.weight.narrow(self.dim, self.weight.shape[self.dim] - pad, pad).zero_()
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @torch.no_grad()
    def load_shard(self, name: str, source: Any, part: int | None = None) -> None:
        """Fill parameter `name` from `source`: the full tensor, or a safetensors slice of it.

        With `part`, `source` holds only that one of the layer's outputs (0 is q or gate, 1 is k or up, and so on).
        """
        if self._parameters.get(name) is None:
            raise ArgumentError(f"name is {name!r}: expected one of {[n for n, _ in self.named_parameters()]}")
        if part is not None and not (type(part) is int and 0 <= part < len(self.parts)):
            raise ArgumentError(f"part is {part!r}: expected an integer, 0 <= part < {len(self.parts)}")
        if not (isinstance(source, torch.Tensor) or hasattr(source, "get_shape")):
            raise ArgumentError(
                f"source is a {type(source).__name__}: expected a tensor or a slice of a safetensors file"
            )
        if name == "weight" and self.stored_transposed:
            source = Transposed(source)
        split = name == "weight" or self.dim == 0
        shard = concat(self.parts) if part is None else self.parts[part]
        expected = [self.out_features, self.in_features] if name == "weight" else [self.out_features]
        if split:
            expected[self.dim] = shard.total
        given = list(source.shape if isinstance(source, torch.Tensor) else source.get_shape())
        if given != expected:
            raise ShapeError(f"source of {name} has shape {given}: expected {expected}, the unsplit tensor")
        before = sum(each.size for each in self.parts[:part]) if part else 0
        if name == "weight":
            self.storage.fill(self, before, shard, source)
        elif split:
            shard.fill(self.allocated(name).narrow(0, before, shard.size), source, 0)
        else:
            fill(self.allocated(name), source)

    def allocated(self, name: str) -> nn.Parameter:
        """Return the parameter `name`, on the context's device if it was on meta before."""
        parameter = getattr(self, name)
        if parameter.is_meta:
            parameter = nn.Parameter(torch.empty_like(parameter, device=self.ctx.device), requires_grad=False)
            setattr(self, name, parameter)
        return parameter

    def load_linears(self, linears: Sequence[nn.Linear]) -> Self:
        """Fill this layer from one Linear that holds all outputs, or from one for each output, and return it."""
        fused = len(linears) == 1
        if not fused and len(linears) != len(self.parts):
            raise ArgumentError(
                f"linear is a list of {len(linears)}: expected one, or one for each of {len(self.parts)}"
            )
        if any(linear.weight.dtype != linears[0].weight.dtype for linear in linears):
            raise ArgumentError("linear is a list of which some have weights of another dtype: expected one dtype")
        for part, linear in enumerate(linears):
            if (linear.bias is None) != (self.bias is None):
                raise ArgumentError("linear is a list of which some have a bias: expected all or none")
            for name, source in linear.named_parameters():
                if not source.is_meta:
                    self.load_shard(name, source.detach(), None if fused else part)
        return self

    def rows(self, x: torch.Tensor, features: int) -> torch.Tensor:
        """Return `x` as [rows, features], checked, in the dtype of the product."""
        x = self.check(x, features)
        return x.reshape(row_count(x), features)

    def check(self, x: torch.Tensor, features: int) -> torch.Tensor:
        """Return `x` in the dtype of the product. Raises unless it is [..., features] of the weight's dtype and device.

        Under torch.autocast both may have other dtypes: the product is in autocast's, as that of torch.nn.Linear.
        """
        if not isinstance(x, torch.Tensor):
            raise ArgumentError(f"input is a {type(x).__name__}: expected a tensor")
        if is_dtensor(x):
            raise ArgumentError(f"input is a DTensor of shape {tuple(x.shape)}: expected this rank's plain tensor")
        if x.dim() < 1 or x.shape[-1] != features:
            note = "" if features == self.in_features else f", this rank's part of {self.in_features} features"
            raise ShapeError(f"input has shape {tuple(x.shape)}: expected [..., {features}]{note}")
        dtype = self.dtype
        if torch.is_autocast_enabled(self._device_type):
            x, dtype = autocast(x, self._device_type), autocast_dtype(dtype, self._device_type)
        if x.dtype != dtype:
            raise DtypeError(f"input is {x.dtype}: expected {dtype}, the weight's; convert one of them")
        if x.device != self.weight.device:
            raise DeviceError(f"input lies on {x.device}: expected {self.weight.device}, where the weight lies")
        if self.sequence_parallel and x.dim() != 2 and not (x.dim() == 3 and x.shape[0] == 1):
            raise ShapeError(
                f"input has shape {tuple(x.shape)}: sequence parallel expects [tokens, {features}] or"
                f" [1, tokens, {features}]; flatten a larger batch into tokens before it is split"
            )
        if may_differentiate():
            check_no_gradient(self.op, input=x, weight=self.weight, bias=self.bias)
        return x

    def terms(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return weight, its scales if it has some, and bias for a product in `dtype`.

        `dtype` differs from the layer's only under torch.autocast.
        """
        weight, scale = self.storage.operand(self, dtype)
        bias = self.bias
        return weight, scale, bias if bias is None or bias.dtype == dtype else bias.to(dtype)

    def inputs(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` [..., K] with its columns in the order of the stored weight's."""
        return self.storage.inputs(self, x)

    def product(self, x: torch.Tensor, *size: int) -> torch.Tensor:
        """Return the result of `op` on `x` and the weight: this rank's part, of shape `size`, in a new tensor."""
        return self.exchanged(self.storage.op(self), x, size)

    def exchanged(self, op: str, x: torch.Tensor, size: tuple[int, ...]) -> torch.Tensor:
        """Return the result of `op` on `x` [rows, K] and the weight, however it is stored."""
        weight, scale, bias = self.terms(x.dtype)
        x = self.inputs(x)
        k_per_rank = self.across_ranks.k_per_rank
        if k_per_rank is not None and (k := k_per_rank[self.ctx.cur_rank]) < self.local_shape[1]:
            x, weight = x[:, :k], weight[:, :k]  # the zeros after them are not summed
        return torch_ops.product(op, self.ctx, x, weight.t(), bias, size, self.across_ranks, scale)

    def serve_by(self, op: str) -> None:
        """Let `op` compute forward."""
        self.storage.serve_by(self, op)

    def named(self, op: str) -> str:
        """Return an op and how it reads the stored weight, for reports."""
        return self.storage.named(op)

    def local_product(self, x: torch.Tensor, biased: bool = True) -> torch.Tensor:
        """Return `x` [..., K] times this rank's weight, plus the bias, without an exchange."""
        weight, scale, bias = self.terms(x.dtype)
        bias, x = bias if biased else None, self.inputs(x)
        if self.rows_alike:
            return matmul.linear(self.ctx, x, weight, bias, scale)
        if self.own_steps:
            return skinny_matmul.linear(x, weight, bias, scale)
        return self.storage.linear(self, x, weight, scale, bias)

    def numbers(self, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the numbers of the weight's local rows from `start` to `stop`, in `dtype`, however they are stored."""
        return self.storage.numbers(self, start, stop, dtype)

    @torch.no_grad()
    def store_as(self, form: Form, rounds: bool = True) -> None:
        """Round the weight to `form`, or, while the layer is empty, keep or round each weight that is loaded.

        `rounds`: False where only weights will be loaded whose codes `form` holds.
        """
        self.storage = (Ordered if form.order else Quantised)(self, form, rounds)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Apply `fn` as torch does; a storage may keep its own dtype."""
        return self.storage.apply(self, fn, lambda changed: super(ShardedLinear, self)._apply(changed, recurse))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if hasattr(destination, "_metadata"):
            destination._metadata[prefix[:-1]]["rank"] = self.ctx.cur_rank, self.ctx.num_ranks

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: dict[str, Any], strict: bool,
        missing: list[str], unexpected: list[str], errors: list[str],
    ) -> None:  # fmt: skip
        """Load a state dict. Refuses another rank's shard, which may have the same shape."""
        own = self.ctx.cur_rank, self.ctx.num_ranks
        stored = local_metadata.get("rank", own)
        if stored == own:
            super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)
        else:
            errors.append(
                f"{prefix[:-1]} is the part of rank {stored[0]} of {stored[1]}: expected rank {own[0]} of {own[1]}'s"
            )

    def extra_repr(self) -> str:
        local = "x".join(map(str, self.local_shape))
        return (
            f"in={self.in_features}, out={self.out_features}, local={local}, bias={self.bias is not None},"
            f" op={self.served_by}"
        )


def is_dtensor(value: Any) -> bool:
    """Return whether `value` is a DTensor, by the name of its class: importing torch.distributed.tensor is slow."""
    return type(value).__name__ == "DTensor" and isinstance(value, torch.Tensor)


@torch.no_grad()
def split_parameter(module: nn.Module, key: str, part: Shard, dim: int = 0) -> None:
    """Keep `part` of dimension `dim` of a buffer, or of a parameter of no linear; `part_of` then returns both."""
    full = getattr(module, key)
    size = (*full.shape[:dim], part.size, *full.shape[dim + 1 :])
    local = torch.empty(size, dtype=full.dtype, device=full.device)
    if not full.is_meta:
        part.fill(local, full, dim)
    setattr(module, key, nn.Parameter(local, requires_grad=False) if isinstance(full, nn.Parameter) else local)
    holder: Any = module
    holder._parts = {**getattr(module, "_parts", {}), key: (part, dim)}


def part_of(module: nn.Module, key: str) -> tuple[Shard, int] | None:
    """Return the shard and the dimension that `split_parameter` kept of a parameter; None if it is not split."""
    return getattr(module, "_parts", {}).get(key)


def keep_units(module: nn.Module, key: str, unit: int) -> None:
    """Record that `unit` entries of a parameter's inputs share a scale in the files that it will be filled from."""
    holder: Any = module
    holder._units = {**getattr(module, "_units", {}), key: unit}


def unit_of(module: nn.Module, key: str = "weight") -> int:
    """Return how many entries of a parameter's inputs share a scale and should stay together; 1 by default."""
    return getattr(module, "_units", {}).get(key, 1)


def ranks_of(ctx: Any) -> Any:
    """Return the context whose ranks layers are split over: `ctx`, or with `across` all ranks of all hosts.

    Raises for an object that is not a context, or for one that was closed or has lost a rank.
    """
    if not hasattr(ctx, "num_ranks"):
        raise ArgumentError(f"ctx is a {type(ctx).__name__}: expected the context that iris.iris() returns")
    ctx.check()
    return ctx if getattr(ctx, "across", None) is None else ctx.once(AllHosts)


def check_linears(linears: Sequence[Any]) -> None:
    """Raise unless all are torch.nn.Linear: other classes (transformers' Conv1D) may store their weight differently."""
    for linear in linears:
        if not isinstance(linear, nn.Linear):
            raise ArgumentError(f"linear is a {type(linear).__name__}: expected a torch.nn.Linear")


def device_of(dtype: Any, device: Any, ctx: Any) -> torch.device:
    """Return where a layer's parameters go: the context's device, also for its bare type ("cuda"), or meta.

    Raises for a dtype or a device that they cannot have.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise DtypeError(f"dtype is {dtype!r}: expected None or a floating-point torch.dtype")
    try:
        requested = ctx.device if device is None else torch.device(device)
    except (RuntimeError, TypeError):
        raise DeviceError(f"device is {device!r}: expected None, {str(ctx.device)!r} or 'meta'") from None
    if requested.type != "meta" and (
        requested.type != ctx.device.type or requested.index not in (None, ctx.device.index)
    ):
        raise DeviceError(f"device is {str(requested)!r}: expected the context's, {str(ctx.device)!r}, or 'meta'")
    return requested if requested.type == "meta" else ctx.device


def positive(**sizes: int) -> None:
    """Raise unless each of the named sizes is a positive integer."""
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ArgumentError(f"{name} is {value!r}: expected a positive integer")


def flags(or_none: bool = False, /, **options: bool | None) -> None:
    """Raise unless each of the named options is a bool, or None where `or_none`: a text like "no" would be true."""
    for name, value in options.items():
        if not (isinstance(value, bool) or (or_none and value is None)):
            raise ArgumentError(f"{name} is {value!r}: expected {'None or ' * or_none}a bool")


def parts_or_plain(parts: Any, features: int, ctx: Iris, gathered: bool = False) -> tuple[Shard, ...]:
    """Check and return `parts`, by default one share of all features. `gathered`: whether outputs are gathered."""
    if parts is None:
        return merged((features,), ctx.num_ranks, ctx.cur_rank, gathered, ctx.level)
    known = isinstance(parts, (tuple, list)) and parts and all(isinstance(each, Shard) for each in parts)
    if not known or any(each.pad for each in parts[:-1]):
        raise ArgumentError(f"parts is {parts!r}: expected None or a tuple of Shards, at most the last of them padded")
    return tuple(parts)
