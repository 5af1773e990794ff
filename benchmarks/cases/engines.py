"""Who generates: one model, served in several ways, each behind the same `layers.Engine`.

    ours            the layers as they are: fused ops, long prompts sequence parallel
    ours-unshared   those with `sequence_parallel=False`
    ours-batch      our layers by a context with `invariant="batch"`
    ours-ranks      those by one with "ranks", which are not sequence parallel
    ours-fp8        our layers with weights in fp8, column- and row-parallel (`iris_ops/fp8/`), not sequence parallel
    fp8-shared      those with sequence parallelism
    nccl            the layers of ours-unshared, their ops exchanged for torch's product and NCCL's collective
    sequence-nccl   those of ours, likewise
    transformers    transformers' own tensor parallelism by the same plan, on the same weights
    async-tp        the sequence-parallel layers with the ops that torch's compiler puts there (`_micro_pipeline_tp`):
                    torch.ops.symm_mem.fused_all_gather_matmul and fused_matmul_reduce_scatter; steps as cuBLAS + NCCL
    vllm            vLLM itself, with an engine, ranks and weights of its own (`vllm_engine.py`)

Weights are random unless the model is a folder. They are drawn on each rank's device, so that a 70B shape starts in
seconds: split ones by the rank's own seed, whole ones by one seed for all.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
import copy
from dataclasses import dataclass
import functools
import inspect
from pathlib import Path
from types import SimpleNamespace

from iris import registry
from iris.errors import PlatformError
from iris.group import name_of
from iris_tp.bench.team import Team
import torch
from torch import nn
import torch.distributed as dist
from torch.distributed._symmetric_memory import _SymmetricMemory

from benchmarks.cases import mixtures

_LLAMA3 = dict(vocab_size=128256, num_key_value_heads=8, rope_theta=500000.0, rms_norm_eps=1e-5)
# name: (architecture, sizes)
SHAPES: dict[str, tuple[str, dict]] = {
    "llama-3-8b": ("Llama", dict(_LLAMA3, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
                                 num_attention_heads=32)),
    "llama-3-70b": ("Llama", dict(_LLAMA3, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80,
                                  num_attention_heads=64)),
    "qwen3-32b": ("Qwen3", dict(vocab_size=151936, hidden_size=5120, intermediate_size=25600, num_hidden_layers=64,
                                num_attention_heads=64, num_key_value_heads=8, head_dim=128, rope_theta=1e6)),
    "tiny": ("Llama", dict(vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                           num_attention_heads=4, num_key_value_heads=4)),
    **mixtures.SHAPES,
}  # fmt: skip

OURS, NCCL, TRANSFORMERS, ASYNC_TP = "ours", "nccl", "transformers", "async-tp"
UNSHARED, SEQUENCE_NCCL = "ours-unshared", "sequence-nccl"
# our layers by contexts of their own, which promise the same bits
PROMISING = BATCH, RANKS = "ours-batch", "ours-ranks"
# vLLM, which runs apart: as it is, and with bits that do not depend on the batch
APART = VLLM, VLLM_BATCH = "vllm", "vllm-batch"
FP8, FP8_SHARED = IN_FP8 = "ours-fp8", "fp8-shared"
NAMES = {
    OURS: "ours",
    UNSHARED: "ours, tokens not shared",
    BATCH: 'ours, invariant="batch"',
    RANKS: 'ours, invariant="ranks"',
    FP8: "ours, fp8",
    FP8_SHARED: "ours, fp8, sequence parallel",
    NCCL: "cuBLAS + NCCL",
    SEQUENCE_NCCL: "cuBLAS + NCCL, sequence parallel",
    TRANSFORMERS: "transformers",
    ASYNC_TP: "torch async-TP",
    VLLM: "vLLM",
    VLLM_BATCH: "vLLM, VLLM_BATCH_INVARIANT=1",
}


@dataclass(frozen=True)
class Contender:
    key: str
    model: nn.Module
    prepare: Callable[[], None]  # to be called before the model runs: it may be shared with another contender
    context: object = None  # what the layers ask for their ops
    heap: Callable[[], int] = lambda: 0  # bytes in use beside torch's

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
        """Nothing to choose."""

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


def contenders(team: Team, ctx, model: nn.Module, wanted: list[str]) -> tuple[list[Contender], dict[str, str]]:
    """Those of `wanted` that can be built on `model`, split without sequence parallelism, and why the others cannot."""
    nccl, async_tp = (_Context(ctx, name, ops) for name, ops in ((NCCL, NcclOps()), (ASYNC_TP, AsyncTpOps())))
    shared = functools.cache(lambda: with_shared_tokens(model, ctx))
    makers = {
        OURS: lambda: Contender(OURS, shared(), lambda: serve(shared(), ctx), ctx, lambda: sum(ctx.heap.used)),
        UNSHARED: lambda: Contender(UNSHARED, model, lambda: serve(model, ctx), ctx, lambda: sum(ctx.heap.used)),
        SEQUENCE_NCCL: lambda: Contender(SEQUENCE_NCCL, shared(), lambda: serve(shared(), nccl), nccl),
        ASYNC_TP: lambda: Contender(ASYNC_TP, on_gpus(shared, ctx), lambda: serve(shared(), async_tp), async_tp),
        BATCH: lambda: invariant(model, ctx, BATCH, "batch"),
        RANKS: lambda: invariant(model, ctx, RANKS, "ranks"),
        FP8: lambda: Contender(FP8, in_fp8(model, ctx), lambda: None, ctx, lambda: sum(ctx.heap.used)),
        FP8_SHARED: lambda: Contender(
            FP8_SHARED, in_fp8(model, ctx, shared=True), lambda: None, ctx, lambda: sum(ctx.heap.used)
        ),
        NCCL: lambda: Contender(NCCL, model, lambda: serve(model, nccl), nccl),
        TRANSFORMERS: lambda: Contender(TRANSFORMERS, transformers_parallel(model, team), lambda: None),
    }
    built, failed = [], {}
    for key in wanted:
        contender, reason = team.attempt(makers[key])
        if reason:
            failed[key] = reason
        else:
            built.append(contender)
    return built, failed


def invariant(model: nn.Module, ctx, key: str, level: str) -> Contender:
    """The model split by a context of its own, whose results have the same bits in every batch or on all ranks.

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
    """The model, for a contender whose ops there are on GPUs only."""
    if ctx.device.type == "cpu":
        raise PlatformError("needs GPUs: torch has no symmetric memory on CPUs")
    return model()


def serve(model: nn.Module, ctx) -> None:
    """Makes the split linears of `model` call the ops of `ctx`, and without an exchange torch's product unless ours."""
    from layers.experts import SplitExperts
    from layers.sharded import ShardedLinear

    for module in model.modules():
        if isinstance(module, ShardedLinear):
            module.ctx, module.own_steps = ctx, not isinstance(ctx, _Context)
        elif isinstance(module, SplitExperts):
            module.ctx = ctx
        for hook in module._forward_hooks.values():  # that gathers the tokens at the end
            if hasattr(hook, "ctx"):
                hook.ctx = ctx


class _Context:
    """What layers ask of a context, with `ops` and torch's gather in place of ours. Compiled layers find it by name."""

    def __init__(self, ctx, name: str, ops: NcclOps):
        self.device, self.cur_rank, self.num_ranks, self.ops = ctx.device, ctx.cur_rank, ctx.num_ranks, ops
        self.ccl = SimpleNamespace(all_gather=dist.all_gather_into_tensor, all_reduce=_all_reduce)
        self.group_name = name_of(name)
        registry.add(self.group_name, self)


def _all_reduce(out: torch.Tensor, part: torch.Tensor) -> None:
    dist.all_reduce(out.copy_(part))


_FEW = 4  # tokens from which on ranks share them on CPUs, where prompts are short


def with_shared_tokens(split: nn.Module, ctx) -> nn.Module:
    """The same model split as `ctx` splits it by default; it shares its weights with `split`.

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


def in_fp8(split: nn.Module, ctx, shared: bool = False) -> nn.Module:
    """The same model with the weights that can be in fp8 rounded to it; it shares the others with `split`."""
    from iris_ops.fp8 import scaled_matmul
    import layers
    from layers.checkpoint.load import _compute_buffers

    model = empty_model(copy.deepcopy(split.config), split.dtype)
    least = _FEW if shared and ctx.device.type == "cpu" else shared
    layers.parallelize(model, ctx, weights="fp8_all", sequence_parallel=least)
    for name, module in model.named_modules():
        whole = split.get_submodule(name)
        for key in list(module._parameters):
            setattr(module, key, getattr(whole, key))
        if takes_fp8(whole):
            weight, scale = scaled_matmul.quantised(whole.weight)
            module.weight, module.weight_scale = (nn.Parameter(each, requires_grad=False) for each in (weight, scale))
    share_buffers(model, split)
    _compute_buffers(model, ctx.device)
    return model.eval()


def takes_fp8(module: nn.Module) -> bool:
    """Whether `in_fp8` rounds the weight of this module of a split model."""
    from layers.sharded import WITH_FP8, ShardedLinear

    return isinstance(module, ShardedLinear) and module.op in WITH_FP8


def as_in_fp8(module: nn.Module, name: str, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What `in_fp8` makes of a parameter of a split model, in `dtype`."""
    from iris_ops.fp8 import scaled_matmul

    rounded = name == "weight" and takes_fp8(module)
    return scaled_matmul.restored(*scaled_matmul.quantised(parameter), dtype) if rounded else parameter.to(dtype)


def config_of(name: str, depth: int | None = None):
    """The configuration of a shape by name, or of a checkpoint's folder, with `depth` layers if given."""
    import transformers

    if name in SHAPES:
        architecture, sizes = SHAPES[name]
        longest = {"max_position_embeddings": 1 << 17, "eos_token_id": None}
        config = getattr(transformers, f"{architecture}Config")(**longest, **sizes)
    else:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    if depth:
        config.num_hidden_layers = depth
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:depth]
        if getattr(config, "mlp_layer_types", None):
            config.mlp_layer_types = config.mlp_layer_types[:depth]
    return config


def config_for_others(name: str, depth: int | None = None):
    """`config_of`, as other engines read it from a folder: with the name of the model's class."""
    config = config_of(name, depth)
    if name in SHAPES:
        config.architectures = [f"{SHAPES[name][0]}ForCausalLM"]
    return config


def build(name: str, depth: int | None, ctx, dtype: torch.dtype) -> nn.Module:
    """A split model without sequence parallelism: random weights for a shape, the checkpoint's for a folder."""
    import layers
    from layers.checkpoint.load import _compute_buffers

    if Path(name).is_dir():
        if depth:
            raise SystemExit("--layers goes with a model shape: a checkpoint is loaded whole")
        return layers.from_pretrained(name, ctx, dtype=dtype, sequence_parallel=False)
    model = empty_model(config_of(name, depth), dtype)
    layers.parallelize(model, ctx, sequence_parallel=False)
    draw(model, ctx)
    _compute_buffers(model, ctx.device)
    return model.eval()


def empty_model(config, dtype: torch.dtype) -> nn.Module:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).requires_grad_(False)


@torch.no_grad()
def draw(model: nn.Module, ctx) -> None:
    """Allocates and fills the parameters of an empty split model: matrices at random, norms with ones, biases zero."""
    from layers.sharded import ShardedLinear, part_of

    alike, own = (torch.Generator(ctx.device).manual_seed(seed) for seed in (1, 2 + ctx.cur_rank))
    for module in model.modules():
        split = isinstance(module, ShardedLinear)
        for name, parameter in list(module.named_parameters(recurse=False)):
            value = torch.empty_like(parameter, device=ctx.device)
            if parameter.dim() < 2:
                value.fill_(0 if name == "bias" else 1)
            else:
                value.normal_(std=0.02, generator=own if split or part_of(module, name) else alike)
            setattr(module, name, nn.Parameter(value, requires_grad=False))
    for name, buffer in model.named_buffers():  # that are stored, as corrections of a router are; others are computed
        if buffer.is_meta:
            set_buffer(model, name, torch.zeros_like(buffer, device=ctx.device))
    mixtures.make_uneven(model)


def set_buffer(model: nn.Module, name: str, value: torch.Tensor) -> None:
    parent, _, key = name.rpartition(".")
    setattr(model.get_submodule(parent), key, value)


def share_buffers(model: nn.Module, split: nn.Module) -> None:
    """Gives `model` those buffers of `split` that are stored."""
    computed = {name for name, _ in model.named_non_persistent_buffers()}
    for name in [name for name, _ in model.named_buffers() if name not in computed]:
        set_buffer(model, name, split.get_buffer(name))


def transformers_parallel(split: nn.Module, team: Team) -> nn.Module:
    """The same model by transformers' tensor parallelism; it shares its weights with `split`."""
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
        for dim, (have, want) in enumerate(zip(value.shape, local.shape, strict=True)):
            if have == want * team.world:  # whole with us
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
    """This rank's part of the parameter that the unsplit model calls `name`."""
    parent, _, key = name.rpartition(".")
    return getattr(split.get_submodule(parent), key).detach()
