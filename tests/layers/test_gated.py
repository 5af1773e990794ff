"""Gated MLPs that are exchanged: what they held stays, and whatever is more than the plain form counts as before."""

from __future__ import annotations

import functools
from types import MethodType

from iris import platform
from iris.errors import ArgumentError
from iris_ops import torch_ops
from iris_ops.local import gated_matmul, skinny_matmul
import layers
from layers.hf import gated_mlp
from layers.hf.gated_mlp import GatedMLP
import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F

from tests.harness import UNDER_TORCHRUN, both, run_ranks
from tests.layers import models

pytestmark = [*both, pytest.mark.skipif(UNDER_TORCHRUN, reason="has the functions of its process exchanged")]


class MLP(nn.Module):
    """With an activation that is a function, and more than its linears."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.size = 32
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(32, 40), nn.Linear(32, 40), nn.Linear(40, 32)
        self.act_fn = F.silu
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("kept", torch.ones(5))

    def forward(self, states):
        return self.down_proj(self.act_fn(self.gate_proj(states)) * self.up_proj(states))


class Stack(nn.Module):
    def __init__(self, kind: type[MLP] = MLP) -> None:
        super().__init__()
        self.layers = nn.ModuleList([kind(), kind()])


PLAN = {"layers.*.gate_proj": "colwise", "layers.*.up_proj": "colwise", "layers.*.down_proj": "rowwise"}


def doubled(forward):
    @functools.wraps(forward)
    def inner(self, x):
        return 2 * forward(self, x)

    return inner


class Decorated(MLP):
    @doubled
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class WithMore(MLP):
    def forward(self, x, **more):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Property(MLP):
    def __init__(self) -> None:
        super().__init__()
        del self.act_fn

    @property
    def act_fn(self):
        return F.silu

    @act_fn.setter
    def act_fn(self, _) -> None: ...

    @act_fn.deleter
    def act_fn(self) -> None: ...

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def own_forward(mlp: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x)) + x


def serve_few_rows(patch: pytest.MonkeyPatch) -> None:
    """As in a capture, which there is none of on CPUs."""
    patch.setattr(skinny_matmul, "is_faster", lambda x, weight, *_: x.shape[:-1].numel() <= 16 and weight.shape[0] > 0)


def serve_many_rows(patch: pytest.MonkeyPatch) -> None:
    """Pretend that warps can be specialised; here a kernel after torch's product applies the gate."""
    patch.setattr(gated_mlp, "has_many_rows", lambda *_: True)


SERVED = [serve_few_rows, serve_many_rows]


def close(result: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(result, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def held_body(ctx) -> None:
    model, whole = Stack(), Stack()
    layers.parallelize(model, ctx, plan=PLAN)
    mlp, x = model.layers[0].eval(), torch.randn(3, 32, generator=torch.Generator().manual_seed(1))
    assert isinstance(mlp, GatedMLP) and mlp.size == 32 and mlp.act_fn is F.silu
    assert {"unused", "kept"} < mlp.state_dict().keys()
    for serve in (lambda patch: None, *SERVED):
        with pytest.MonkeyPatch.context() as patch:
            serve(patch)
            assert close(mlp(x), whole.layers[0](x))
            assert close(mlp(states=x), whole.layers[0](x))


@pytest.mark.parametrize("world_size", [1, 3])
def test_what_a_module_holds_stays(world_size: int) -> None:
    run_ranks(world_size, held_body)


@torch.no_grad()
def left_alone_body(ctx, kind: type[MLP], change: str) -> None:
    model, whole = Stack(kind), Stack(kind)
    calls = []
    for each in (model, whole):
        mlp = each.layers[0]
        if change == "forward":
            mlp.forward = MethodType(own_forward, mlp)
        elif change == "hook":
            mlp.act_fn = nn.SiLU()
            mlp.act_fn.register_forward_hook(lambda *_: calls.append(1))
    layers.parallelize(model, ctx, plan=PLAN)
    assert not calls
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(1))
    assert not isinstance(model.layers[0], GatedMLP)
    with pytest.MonkeyPatch.context() as patch:
        serve_few_rows(patch)
        assert close(model.layers[0](x), whole.layers[0](x))
    assert len(calls) == (2 if change == "hook" else 0)


@pytest.mark.parametrize(
    "kind, change",
    [(Decorated, ""), (WithMore, ""), (Property, ""), (MLP, "forward"), (MLP, "hook")],
    ids=["decorated", "more arguments", "property", "forward of an instance", "hooked activation"],
)
def test_what_is_more_than_plain_is_left_alone(kind: type[MLP], change: str) -> None:
    run_ranks(2, left_alone_body, kind, change)


class Halved(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(x) / 2


@torch.no_grad()
def changed_later_body(ctx, serve) -> None:
    model, x = Stack(), torch.randn(3, 32, generator=torch.Generator().manual_seed(1))
    for mlp in model.layers:
        mlp.act_fn = nn.SiLU()
    layers.parallelize(model, ctx, plan=PLAN)
    first, second = model.layers
    calls = []
    second.gate_proj.register_forward_hook(lambda *_: calls.append("gate"))
    with pytest.MonkeyPatch.context() as patch:
        serve(patch)
        plain = first(x) - first.down_proj.bias
        first.act_fn = Halved()
        assert close(first(x) - first.down_proj.bias, plain / 2)
        second(x)
        assert calls == ["gate"]


@pytest.mark.parametrize("serve", SERVED)
def test_what_is_passed_over_is_called_once_it_is_exchanged_or_hooked(serve) -> None:
    run_ranks(2, changed_later_body, serve)


def who_is_served_body(ctx) -> None:
    """Prompts of an MLP on GPUs whose warps can be specialised; here another kernel gates."""
    called: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(platform, "has_warp_specialisation", lambda device: True)
        patch.setattr(gated_matmul, "gated", reported(gated_matmul.gated, "gated", called))
        model = Stack().bfloat16()
        layers.parallelize(model, ctx, plan=PLAN)
        mlp, many = model.layers[0].to(ctx.device), torch.randn(2, 200, 32).to(ctx.device, torch.bfloat16)
        for x, count in ((many, 1), (many[:1], 1), (torch.cat([many, many[:, :57]], 1), 2)):
            mlp(x)
            assert len(called) == count, "more than a few rows only"
        for needed in (many, mlp.gate_up_proj.weight, mlp.gate_up_proj.bias):
            needed.requires_grad_()
            with pytest.raises(ArgumentError, match="requires grad"):
                mlp(many)
            with torch.no_grad():
                mlp(many)
            needed.requires_grad_(False)


def test_gradients_are_refused_where_many_rows_are_gated() -> None:
    """For the input, the weight and the bias separately."""
    run_ranks(1, who_is_served_body)


@torch.no_grad()
def compiled_body(ctx) -> int:
    """How often an MLP whose activation is a function is compiled for prompts of several lengths."""
    torch.compiler.reset()
    counter = CompileCounter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(platform, "has_warp_specialisation", lambda device: True)
        model = Stack().bfloat16()
        layers.parallelize(model, ctx, plan=PLAN)
        mlp = model.layers[0].to(ctx.device)
        compiled = torch.compile(mlp, fullgraph=True, dynamic=True, backend=counter)
        for rows in (300, 400, 50):
            x = torch.randn(rows, 32).to(ctx.device, torch.bfloat16)
            assert torch.allclose(compiled(x), mlp(x), rtol=0.1, atol=0.1)
    return counter.frame_count


def test_it_is_compiled_as_a_whole_and_once_for_all_lengths() -> None:
    assert run_ranks(1, compiled_body) == [1]


def reported(run, op: str | None, called: list[str]):
    """`run`, which tells of its calls: of the ops by their names, its first argument, or of `op`."""

    def inside(*args):
        called.append(op or args[0])
        return run(*args)

    return inside


def many_rows_body(ctx, name: str, sequence_parallel: int | bool, backend: str | bool) -> list[str]:
    """Logits of prompts of whole models, gated in one op and not; which ops were called."""
    found = []
    for serve in (lambda patch: None, serve_many_rows):
        model, called = models.build(name), []
        layers.parallelize(model, ctx, sequence_parallel=sequence_parallel)
        with pytest.MonkeyPatch.context() as patch:
            serve(patch)
            patch.setattr(gated_matmul, "gated", reported(gated_matmul.gated, "matmul_gated", called))
            patch.setattr(torch_ops, "product", reported(torch_ops.product, None, called))
            found.append(layers.Engine(model, ctx, 2, 32, compile=backend).read(torch.arange(24).view(2, 12)))
    assert close(*found)
    return called


@pytest.mark.parametrize("backend", [False, "eager"])
@pytest.mark.parametrize("sequence_parallel", [False, 4])
@pytest.mark.parametrize("world_size, name", [(2, "plain"), (3, "width130")])
@pytest.mark.some(2)
def test_prompts_are_gated_with_the_product(
    world_size: int, name: str, sequence_parallel: int | bool, backend: str | bool
) -> None:
    """Of tokens that are here, and of those that ranks share; also where ranks have parts of several widths."""
    expected = "all_gather_matmul_gated" if sequence_parallel else "matmul_gated"
    for called in run_ranks(world_size, many_rows_body, name, sequence_parallel, backend):
        assert called.count(expected) >= 2, called  # layers; a compiler calls them too
