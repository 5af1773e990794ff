"""Sequence parallel from end to end: between the products each rank holds its share of the tokens only.

    embedding [B, T, H] -> first layer -> this rank's rows [B*T/w, H] -> ... -> last layer -> [B, T, H] -> norm and head

    in a layer          norm, residual sum      on this rank's rows
                        qkv, gate and up        all_gather_matmul: rows of all ranks, columns of this one
                        o_proj, down_proj       matmul_reduce_scatter: this rank's rows of the sum

So norms and sums take 1/w of the work, and the reduction's second half, which spreads the sums to all ranks, happens
inside the next product. It pays for many tokens. Few tokens, or a number that w does not divide, run as usual (an
engine adds a few to such prompts). `parallelize` does it by default for the families of `KNOWN`.

A call decides at the entrance of the model whether it is sequence parallel, and `Sharing` holds the decision. A
share has two dimensions, [rows, H], where whole hidden states have three, [B, T, H]. The position embeddings, which
are replicated, give B and T.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
import inspect
import re
from typing import TYPE_CHECKING, Any

from iris.errors import ShapeError, StyleError
from iris_ops import torch_ops
from iris_ops.planning.operations import GATED
from iris_ops.recording import is_leaving_torch, row_count
import torch
from torch import nn

from ..linear import ColumnParallelLinear, RowParallelLinear
from ..shard import chunk
from ..weight_storage import GATHERED, LOCAL, SCATTERED
from .merge import Product, families_of, sole_use

if TYPE_CHECKING:
    from iris.context import Iris

LEAST = 2048  # tokens; from here replayed prompts gain, on two H200s and on four; at 1024 they lose
# A gather by copy engines costs the host some 150 us until it has become a graph. Eager launches gain where the device
# takes longer, some 1.5 ms a layer: where tokens times weights are these.
_BUSY = 5e11
# Model types of transformers whose layers, by our tests, treat each token alike between the products.
KNOWN = frozenset(
    ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "olmo", "granite", "cohere", "smollm3")
)


class Sharing:
    """Decides whether a call shares its tokens over `world` ranks: from `least` tokens on or, where launched eagerly,
    from `eager` tokens on. `now`: the decision for the call that is under way.
    """

    def __init__(self, world: int, least: int, eager: int | None = None):
        self.world, self.least, self.eager = world, least, least if eager is None else max(least, eager)
        self.now = self.replayed = False

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Use the limit of calls that are replayed from a graph in the block, their captures and warm-ups included."""
        self.replayed = True
        try:
            yield
        finally:
            self.replayed = False

    def has_enough(self, tokens: int) -> bool:
        """Return whether there are enough tokens."""
        return self.world > 1 and tokens >= (self.least if self.replayed else self.eager)

    def decide(self, tokens: int) -> bool:
        # a graph for all lengths has one way for all lengths
        self.now = not is_leaving_torch() and self.has_enough(tokens) and tokens % self.world == 0
        return self.now


class GatheringColumn(ColumnParallelLinear):
    """A column-parallel linear of all tokens, [B, T, K], or this rank's, [rows, K]; it returns all of them."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.op = GATHERED

    @property
    def served_by(self) -> str:
        return f"{self.named(LOCAL)}, sequence parallel {self.op}"

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # as many tokens a rank
        if input.dim() != 2:
            return self.local_product(self.check(input, self.in_features))
        x = self.rows(input, self.in_features)
        size = (x.shape[0] * self.ctx.num_ranks, self.local_shape[0])
        return self.exchanged(GATHERED, x, size)

    def gated(self, input: torch.Tensor) -> torch.Tensor:
        """Do the same for all tokens, whether they are all here or only this rank's, [rows, K]."""
        if input.dim() != 2:
            return super().gated(input)
        x = self.rows(input, self.in_features)
        size = (x.shape[0] * self.ctx.num_ranks, self.local_shape[0] // 2)
        return self.exchanged(GATED, x, size)


class ScatteringRow(RowParallelLinear):
    """A row-parallel linear that keeps this rank's rows of the sum, [rows, N], in a sequence-parallel call."""

    sharing: Sharing

    @property
    def served_by(self) -> str:
        return f"{self.op}, sequence parallel {self.named(SCATTERED)}"

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.sharing.now:
            return super().forward(input)
        x = self.rows(input, self.local_shape[1])
        size = (x.shape[0] // self.ctx.num_ranks, self.out_features)
        return self.exchanged(SCATTERED, x, size)


class SequenceProduct(Product):
    """The merged product of this rank's tokens, or of all of them; the attention sees [B, T, columns] either way."""

    sharing: Sharing

    def multiply(self, x: torch.Tensor, kwargs: dict) -> torch.Tensor:
        if x.dim() != 2 and self.sharing.now:
            raise ShapeError(
                f"input has shape {tuple(x.shape)}: expected this rank's tokens, [rows, features], as the model's first"
                " decoder layer cuts them; call the whole model"
            )
        product = self.merged(x)
        if x.dim() == 2 and "position_embeddings" in kwargs:
            return by_rows(product, kwargs)
        return product

    def exchanges(self, x: torch.Tensor) -> bool:
        return x.dim() == 2 or self.sharing.now


class _Share:
    """Before the first layer: cuts all tokens to this rank's."""

    def __init__(self, ctx: Iris, name: str, sharing: Sharing):
        self.ctx, self.name, self.sharing = ctx, name, sharing

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if args:
            return (self.share(args[0]), *args[1:]), kwargs
        return args, {**kwargs, self.name: self.share(kwargs[self.name])}

    def share(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = row_count(hidden)
        if not self.sharing.decide(tokens):
            return hidden
        start, stop = chunk(tokens, self.sharing.world, self.ctx.cur_rank)
        # a copy: a compiler would take a view's offset, which differs by rank and length, for one more case
        return hidden.reshape(tokens, -1)[start:stop].clone()


class _Gather:
    """After the last layer: gathers this rank's tokens to all of them."""

    def __init__(self, ctx: Iris, sharing: Sharing):
        self.ctx, self.sharing = ctx, sharing

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict, output: torch.Tensor) -> torch.Tensor:
        self.sharing.now = False
        return output if output.dim() != 2 else by_rows(torch_ops.gather_rows(self.ctx, output), kwargs)


class _GatherStates:
    """After the model: gathers outputs of this rank's tokens. These are requested hidden states and, where the last
    layer was not called because the stack is cut, those at the end.
    """

    def __init__(self, ctx: Iris, sharing: Sharing):
        self.ctx, self.sharing = ctx, sharing

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        self.sharing.now = False
        inputs = (*args[:1], kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
        given = next(each for each in inputs if each is not None)
        if isinstance(output, tuple):  # with `return_dict=False`
            return tuple(self.whole(each, given) for each in output)
        for name in ("last_hidden_state", "hidden_states"):
            held = getattr(output, name, None)
            if (whole := self.whole(held, given)) is not held:
                setattr(output, name, whole)
        return output

    def whole(self, held: Any, given: torch.Tensor) -> Any:
        if isinstance(held, tuple):
            return tuple(self.whole(each, given) for each in held)
        if not torch.is_tensor(held) or held.dim() != 2:
            return held
        return torch_ops.gather_rows(self.ctx, held).view(*given.shape[:2], held.shape[1])


def by_rows(tokens: torch.Tensor, kwargs: dict) -> torch.Tensor:
    """Return [B*T, ...] as [B, T, ...], by the position embeddings of layers and their attentions."""
    batch, length = kwargs["position_embeddings"][0].shape[:2]
    if tokens.shape[0] != batch * length:  # one row for the whole batch
        batch = tokens.shape[0] // length
    return tokens.view(batch, length, tokens.shape[1])  # for compilers: relates the three sizes


def is_known(model: nn.Module, styles: dict[str, str]) -> bool:
    """Return whether `model` split by `styles` is of a family that shares its tokens by default, and can."""
    if getattr(getattr(model, "config", None), "model_type", None) not in KNOWN:
        return False
    try:
        check(model, styles)
    except StyleError:  # a replicated part, a replaced forward
        return False
    return True


def check(model: nn.Module, styles: dict[str, str]) -> None:
    """Raise `StyleError`, naming the module, if `model` split by `styles` cannot run sequence parallel."""
    families = families_of(styles)
    for name, style in styles.items():
        if re.search(r"\.\d+\.", name) and style not in ("colwise", "rowwise") and "replica" not in style:
            raise StyleError(
                f"{name} has style {style!r}: sequence parallel expects colwise and rowwise in a layer; leave"
                " sequence_parallel at 'auto', or pass False"
            )
    for parent, children in families.items():
        module = model.get_submodule(parent)
        forward = type(module).forward
        used = None if "forward" in vars(module) else sole_use(forward)
        linears = [model.get_submodule(f"{parent}.{child}") for child in children]
        alike = len({(linear.bias is None, linear.weight.dtype, linear.in_features) for linear in linears}) == 1
        if len(children) < 2 or used is None or used[1] != set(children) or not alike:
            raise StyleError(
                f"{parent}'s forward does not use its input for {', '.join(children)} alone: sequence parallel passes"
                " their product to the forward instead of the input"
            )
        if "q_proj" in children and "position_embeddings" not in inspect.signature(forward).parameters:
            raise StyleError(f"{parent} takes no position_embeddings: sequence parallel reads the length off them")
    names = layers_of(families)
    inside = [{parent.removeprefix(name) for parent in families if parent.startswith(f"{name}.")} for name in names]
    stack: Any = model.get_submodule(names[0].rpartition(".")[0])
    whole = len(stack) == len(names)
    if not whole or len(inside[0]) < 2 or any(each != inside[0] for each in inside):
        raise StyleError("the plan splits only a part of the decoder layers: sequence parallel expects all of each")


def share_tokens(model: nn.Module, styles: dict[str, str], ctx: Iris, least: int | None) -> None:
    """Add hooks at the entrance of the first decoder layer, at the exit of the last and at that of their model.

    `least`: None for `LEAST`, and more for eager launches.
    """
    names = layers_of(families_of(styles))
    first, last = (model.get_submodule(name) for name in (names[0], names[-1]))
    linears = [each for each in first.modules() if isinstance(each, ColumnParallelLinear | RowParallelLinear)]
    weights = sum(each.in_features * each.out_features for each in linears) / ctx.num_ranks
    sharing = Sharing(ctx.num_ranks, least or LEAST, None if least else int(_BUSY / weights))
    argument = list(inspect.signature(type(first).forward).parameters)[1]
    first.register_forward_pre_hook(_Share(ctx, argument, sharing), with_kwargs=True)
    last.register_forward_hook(_Gather(ctx, sharing), with_kwargs=True)
    stack = names[0].rpartition(".")[0]
    around = model.get_submodule(stack.rpartition(".")[0])
    around.register_forward_hook(_GatherStates(ctx, sharing), with_kwargs=True)
    for module in model.modules():
        if isinstance(module, ScatteringRow):
            module.sharing = sharing
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, SequenceProduct):
                hook.sharing = sharing


def sharing_of(model: nn.Module) -> Sharing | None:
    """Return the `Sharing` of `model`, if it may run sequence parallel."""
    return next((each.sharing for each in model.modules() if isinstance(each, ScatteringRow)), None)


def layers_of(families: dict[str, list[str]]) -> list[str]:
    """Return the names of the decoder layers, in order."""
    layers = {}
    for parent in families:
        match = re.match(r"(.*)\.(\d+)\.", parent)
        if not match:
            raise StyleError(f"{parent} is in no numbered layer: sequence parallel expects a list of decoder layers")
        layers[match[1], int(match[2])] = match[0][:-1]
    if len({stack for stack, _ in layers}) != 1:
        raise StyleError("the plan splits no list of layers, or several: sequence parallel expects one")
    return [layers[key] for key in sorted(layers)]
