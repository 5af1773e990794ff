"""Contenders that generate: one model, served in several ways, each through the same `layers.Engine`.

ours            the layers as they are: fused ops, long prompts sequence parallel
ours-unshared   those with `sequence_parallel=False`
ours-batch      our layers by a context with `invariant="batch"`
ours-ranks      those by one with "ranks", which are not sequence parallel
ours-FORMAT     our layers with weights in fp8, fp8_block, int4 or mxfp4 (`iris_ops/quantised/`), not sequence parallel
fp8-shared      those in fp8 with sequence parallelism
nccl            the layers of ours-unshared, their ops exchanged for torch's product and NCCL's collective
sequence-nccl   those of ours, likewise
transformers    transformers' own tensor parallelism by the same plan, on the same weights
async-tp        the sequence-parallel layers with the ops that torch's compiler puts there (`_micro_pipeline_tp`):
                torch.ops.symm_mem.fused_all_gather_matmul and fused_matmul_reduce_scatter; steps as cuBLAS + NCCL
vllm            vLLM itself, with an engine, ranks and weights of its own (`vllm_engine.py`)
vllm-FORMAT     the same with weights in fp8, int4 or mxfp4
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
import copy
from dataclasses import dataclass
import functools
from functools import partial
import inspect
from types import MethodType, SimpleNamespace

from iris import registry
from iris.errors import PlatformError
from iris.group import name_of
from iris_tp.bench.team import Team
import torch
from torch import nn
import torch.distributed as dist
from torch.distributed._symmetric_memory import _SymmetricMemory

from benchmarks.cases import mixtures, stored_models, truth, vllm_engine
from benchmarks.cases.whole_models import empty_model, share_buffers

OURS, NCCL, TRANSFORMERS, ASYNC_TP = "ours", "nccl", "transformers", "async-tp"
UNSHARED, SEQUENCE_NCCL = "ours-unshared", "sequence-nccl"
# our layers by separate contexts, which promise the same bits
PROMISING = BATCH, RANKS = "ours-batch", "ours-ranks"
# vLLM, which runs apart: as it is, with bits that do not depend on the batch, and with quantized weights
VLLM, VLLM_BATCH = "vllm", "vllm-batch"
APART = tuple(vllm_engine.VARIANTS)
FP8_SHARED = "fp8-shared"
STORED = {
    "ours-fp8": "fp8_all", "ours-fp8_block": "fp8_block", "ours-int4": "int4", "ours-mxfp4": "mxfp4",
    FP8_SHARED: "fp8_all",
}  # fmt: skip
NAMES = {
    OURS: "ours",
    UNSHARED: "ours, tokens not shared",
    BATCH: 'ours, invariant="batch"',
    RANKS: 'ours, invariant="ranks"',
    **{key: f"ours, {key.removeprefix('ours-')}" for key in STORED},
    FP8_SHARED: "ours, fp8, sequence parallel",
    NCCL: "cuBLAS + NCCL",
    SEQUENCE_NCCL: "cuBLAS + NCCL, sequence parallel",
    TRANSFORMERS: "transformers",
    ASYNC_TP: "torch async-TP",
    **{key: f"vLLM, {key.removeprefix('vllm-')}" for key in APART},
    VLLM: "vLLM",
    VLLM_BATCH: "vLLM, VLLM_BATCH_INVARIANT=1",
}


@dataclass(frozen=True)
class Contender:
    key: str
    model: nn.Module
    prepare: Callable[[], None]  # to be called before the model runs: it may be shared with another contender
    context: object = None  # from which the layers take their ops
    heap: Callable[[], int] = lambda: 0  # bytes in use besides torch's
    convert: truth.Convert = truth.as_it_is  # gives its numbers, from the parameters of the model in bf16
    rounds_inputs: bool = False  # of products with many rows, to fp8

    @property
    def name(self) -> str:
        return NAMES[self.key]


class NewTensors:
    """`ctx.ops.outputs` where no peer writes a result: ordinary tensors."""

    def new(self, op, A, B, size, config=None, scale=None) -> torch.Tensor:
        return A.new_empty(size)

    def keeping(self, kept: object) -> AbstractContextManager:
        return nullcontext()


class NcclOps(mixtures.GroupedOps):
    """The ops of `ctx.ops` as torch and NCCL (on CPUs gloo) give them."""

    outputs = NewTensors()

    def plan(self, *_: object, **options: object) -> None:
        """Do nothing: there is nothing to choose."""

    def matmul_all_reduce(self, out, A, B, bias=None, config=None) -> None:
        torch.matmul(A, B, out=out)
        dist.all_reduce(out)
        if bias is not None:
            out += bias

    def matmul_all_gather(self, out, A, B, bias=None, config=None) -> None:
        part = torch.matmul(A, B) if bias is None else torch.addmm(bias, A, B)
        world = dist.get_world_size()
        if part.shape[1] * world != out.shape[1]:
            raise ValueError(f"{out.shape[1]} columns on {world} ranks: NCCL gathers equal parts")
        parts = part.new_empty(world, *part.shape)
        dist.all_gather_into_tensor(parts.flatten(0, 1), part)
        out.view(len(part), world, part.shape[1]).copy_(parts.transpose(0, 1))

    def all_gather_matmul(self, out, A, B, bias=None, config=None) -> None:
        whole = A.new_empty(out.shape[0], A.shape[1])
        dist.all_gather_into_tensor(whole, A)
        torch.matmul(whole, B, out=out)
        if bias is not None:
            out += bias

    def matmul_reduce_scatter(self, out, A, B, bias=None, config=None) -> None:
        dist.reduce_scatter_tensor(out, torch.matmul(A, B))
        if bias is not None:
            out += bias


class AsyncTpOps(NcclOps):
    """Products overlapped with gathers and scatters as torch has them, in the form that takes no multicast."""

    def all_gather_matmul(self, out, A, B, bias=None, config=None) -> None:
        kind = torch._C._autograd.DeviceType.CUDA
        return_A = _SymmetricMemory.has_multicast_support(kind, A.device.index)
        fused = torch.ops.symm_mem.fused_all_gather_matmul
        out.set_(fused(A, [B], 0, dist.group.WORLD.group_name, return_A=return_A)[1][0])
        if bias is not None:
            out += bias

    def matmul_reduce_scatter(self, out, A, B, bias=None, config=None) -> None:
        out.set_(torch.ops.symm_mem.fused_matmul_reduce_scatter(A, B, "sum", 0, dist.group.WORLD.group_name))
        if bias is not None:
            out += bias


def contenders(team: Team, ctx, model: nn.Module, requested: list[str]) -> tuple[list[Contender], dict[str, str]]:
    """Return the contenders `requested` that `model` can run, without sequence parallelism, and why the rest cannot."""
    nccl, async_tp = (_Context(ctx, name, ops) for name, ops in ((NCCL, NcclOps()), (ASYNC_TP, AsyncTpOps())))
    shared = functools.cache(lambda: with_shared_tokens(model, ctx))
    makers = {
        OURS: lambda: Contender(OURS, shared(), lambda: serve(shared(), ctx), ctx, lambda: sum(ctx.heap.used)),
        UNSHARED: lambda: Contender(UNSHARED, model, lambda: serve(model, ctx), ctx, lambda: sum(ctx.heap.used)),
        SEQUENCE_NCCL: lambda: Contender(SEQUENCE_NCCL, shared(), lambda: serve(shared(), nccl), nccl),
        ASYNC_TP: lambda: Contender(ASYNC_TP, on_gpus(shared, ctx), lambda: serve(shared(), async_tp), async_tp),
        BATCH: lambda: invariant(model, ctx, BATCH, "batch"),
        RANKS: lambda: invariant(model, ctx, RANKS, "ranks"),
        **{key: partial(stored, model, ctx, key) for key in STORED},
        NCCL: lambda: by_nccl(model, ctx),
        TRANSFORMERS: lambda: Contender(TRANSFORMERS, transformers_parallel(model, team), lambda: None),
    }
    built, failed = [], {}
    for key in requested:
        contender, reason = team.attempt(makers[key])
        if reason:
            failed[key] = reason
        else:
            built.append(contender)
    return built, failed


def invariant(model: nn.Module, ctx, key: str, level: str) -> Contender:
    """Return the model split by a context of its own, with the same bits in every batch or on any number of ranks.

    Raises `ValueError` where it is split otherwise than `model`, whose weights it shares.
    """
    import iris

    own = iris.iris(ctx.heap_size, invariant=level)
    try:
        parted = with_shared_tokens(model, own)
    except ValueError:
        own.close()
        raise
    return Contender(key, parted, lambda: None, own, lambda: sum(own.heap.used))


def on_gpus(model: Callable[[], nn.Module], ctx) -> nn.Module:
    """Return the model, for a contender whose ops run on GPUs only."""
    if ctx.device.type == "cpu":
        raise PlatformError("needs GPUs: torch has no symmetric memory on CPUs")
    return model()


def serve(model: nn.Module, ctx) -> None:
    """Make the split linears of `model` call the ops of `ctx`, and without an exchange torch's product unless ours.

    The routers of a rival run transformers' code.
    """
    from layers.experts import SplitExperts
    from layers.sharded import ShardedLinear

    for module in model.modules():
        if isinstance(module, ShardedLinear):
            module.ctx, module.own_steps = ctx, not isinstance(ctx, _Context)
        elif isinstance(module, SplitExperts):
            module.ctx = ctx
        elif hasattr(module, "_rule"):  # a router that `layers.hf.routers` has fused, by a subclass of its own
            module.__dict__.pop("forward", None)
            if isinstance(ctx, _Context):
                module.forward = MethodType(type(module).__bases__[0].forward, module)
        for hook in module._forward_hooks.values():  # that gathers the tokens at the end
            if hasattr(hook, "ctx"):
                hook.ctx = ctx


class _Context:
    """The interface of a context that layers use, with `ops` and torch's gather instead of ours. Compiled layers find
    it by name."""

    def __init__(self, ctx, name: str, ops: NcclOps):
        self.device, self.cur_rank, self.num_ranks, self.ops = ctx.device, ctx.cur_rank, ctx.num_ranks, ops
        self.ccl = SimpleNamespace(all_gather=dist.all_gather_into_tensor, all_reduce=_all_reduce)
        self.group_name = name_of(name)
        registry.add(self.group_name, self)


def _all_reduce(out: torch.Tensor, part: torch.Tensor) -> None:
    dist.all_reduce(out.copy_(part))


_FEW = 4  # tokens from which on ranks share them on CPUs, where prompts are short


def with_shared_tokens(split: nn.Module, ctx) -> nn.Module:
    """Return the same model split as `ctx` splits it by default; it shares its weights with `split`.

    Raises `ValueError` where ranks have other parts of them.
    """
    import layers
    from layers.checkpoint.load import _compute_buffers
    from layers.hf import sequence

    model = empty_model(copy.deepcopy(split.config), split.dtype)
    known = model.config.model_type in sequence.KNOWN and ctx.invariant != "ranks"
    layers.parallelize(model, ctx, sequence_parallel=_FEW if ctx.device.type == "cpu" and known else "auto")
    for name, own in list(model.named_parameters(remove_duplicate=False)):
        given = split.get_parameter(name)
        if own.shape != given.shape:
            raise ValueError(
                f"{name}: this rank has {tuple(own.shape)} by one context, {tuple(given.shape)} by another"
            )
        parent, _, key = name.rpartition(".")
        setattr(model.get_submodule(parent), key, split.get_parameter(name))
    share_buffers(model, split)
    _compute_buffers(model, ctx.device)
    return model.eval()


def by_nccl(model: nn.Module, ctx) -> Contender:
    """Return the layers of `model` by torch's products and NCCL's collectives."""
    nccl = _Context(ctx, NCCL, NcclOps())
    return Contender(NCCL, model, lambda: serve(model, nccl), nccl)


def stored(split: nn.Module, ctx, key: str) -> Contender:
    """Return our layers with quantized weights, `key` one of `STORED`."""
    least = (_FEW if ctx.device.type == "cpu" else True) if key == FP8_SHARED else False
    return in_format(key, split, stored_models.rounded(split, ctx, STORED[key], least), ctx)


def in_format(key: str, exact: nn.Module, model: nn.Module, ctx) -> Contender:
    """Return our layers of `model`, whose codes stand for numbers of `exact`."""
    convert, rounds = stored_models.numbers_of(exact, model), STORED[key].startswith("fp8")
    return Contender(key, model, lambda: None, ctx, lambda: sum(ctx.heap.used), convert, rounds)


def transformers_parallel(split: nn.Module, team: Team) -> nn.Module:
    """Return the same model by transformers' tensor parallelism; it shares its weights with `split`."""
    from layers.checkpoint.load import _compute_buffers
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from transformers.distributed import tensor_parallel

    model = empty_model(copy.deepcopy(split.config), split.dtype)
    mesh = init_device_mesh(team.device.type, (team.world,))
    apply = tensor_parallel.apply_tensor_parallelism
    plan = [model._expand_parallel_plan(model.tp_plan)] if len(inspect.signature(apply).parameters) > 2 else []
    apply(model, mesh, *plan)
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        value = local_part(split, name)
        for dim, (own, theirs) in enumerate(zip(value.shape, local.shape, strict=True)):
            if own == theirs * team.world:  # whole with us
                value = value.chunk(team.world, dim)[team.rank]
        if value.shape != local.shape:
            raise ValueError(f"{name} is {tuple(local.shape)} with transformers, {tuple(value.shape)} with us")
        if isinstance(parameter, DTensor):
            value = DTensor.from_local(value, mesh, parameter.placements, run_check=False)
        parent, _, key = name.rpartition(".")
        model.get_submodule(parent)._parameters[key] = nn.Parameter(value, requires_grad=False)
    share_buffers(model, split)
    _compute_buffers(model, team.device)
    return model.eval()


def local_part(split: nn.Module, name: str) -> torch.Tensor:
    """Return this rank's part of the parameter that the unsplit model calls `name`."""
    parent, _, key = name.rpartition(".")
    return getattr(split.get_submodule(parent), key).detach()
