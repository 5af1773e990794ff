"""Installation of the plug-in in one process of an engine: what is served, with which context, in which compile ranges.

Ours or vLLM's is decided by the number of rows, when vLLM compiles. It compiles a graph for each range of rows, and the
plug-in adds two borders:

    1 to FEW_ROWS        norms become part of the all-reduce before and a factor of the products after
    to `most_rows`       products with their all-reduce and norm, by the plan in one kernel, two or three; mixtures of
                         experts with theirs
    above                the graph is not touched

`most_rows` is at most the largest batch that vLLM captures in a CUDA graph, and keeps the symmetric heap within
`HEAP_BYTES`, all of which is reserved here: vLLM measures the memory that a model needs once, so none may be taken
later.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
import json
from typing import Any

import iris
from iris.errors import ArgumentError
from iris.version import __version__
import torch
import torch.distributed as dist
from vllm import envs
from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig, get_current_vllm_config
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger

from . import experts, ops, watch
from .limits import FEW_ROWS, HEAP_BYTES, ROWS, most_rows
from .prepare import Preparation

logger = init_logger("vllm.iris_tp")


@dataclass
class Installed:
    """The state of the plug-in in this process. `most_rows` is 0 where no layer is replaced."""

    group: str
    world: int
    few_rows: int
    most_rows: int
    products: bool = True
    """False once a row-parallel layer has a bias: vLLM adds it on rank 0 only, so ranks' graphs differ."""
    experts: bool = False
    """True once a mixture of experts is replaced."""

    def settings(self) -> dict[str, Any]:
        """Return the settings that compiled graphs depend on, the same on all ranks."""
        return {"version": __version__, **asdict(self)}


def refusal(config: VllmConfig) -> str | None:
    """Return why an engine of this configuration keeps vLLM's own layers, or None."""
    parallel, model = config.parallel_config, config.model_config
    mode = config.compilation_config.mode
    if mode == CompilationMode.NONE:
        return "eager mode: nothing is compiled"
    if mode != CompilationMode.VLLM_COMPILE:
        return f"compilation mode {getattr(mode, 'name', mode)}: VLLM_COMPILE is served"
    if parallel.tensor_parallel_size < 2:
        return "tensor_parallel_size is 1"
    if parallel.enable_dbo:
        return "dual batch overlap"
    if model is not None and model.enable_sleep_mode:
        return "sleep mode frees memory that peers write"
    if envs.VLLM_BATCH_INVARIANT:
        return "VLLM_BATCH_INVARIANT"
    if model is not None and model.dtype != torch.bfloat16:
        return f"dtype {model.dtype}: bfloat16 is served"
    return None


def hidden_size(config: VllmConfig) -> int:
    """Return the columns of the model's all-reduces."""
    assert config.model_config is not None
    return config.model_config.get_hidden_size()


def has_mixtures(config: VllmConfig) -> bool:
    """Return whether the model has mixtures of experts."""
    return config.model_config is not None and config.model_config.get_num_experts() > 0


def one_host(group: Any) -> bool:
    """Return whether all ranks of vLLM's group share this host. Collective."""
    from vllm.distributed.parallel_state import in_the_same_node_as

    return all(in_the_same_node_as(group.cpu_group, source_rank=0))


def install() -> tuple[Installed, Preparation | None]:
    """Make the context of this process and add the borders of the compile ranges. Collective over the TP group.

    Returns what prepares the layers, or None where no layer is replaced.
    """
    config = get_current_vllm_config()
    reason = refusal(config)
    group = get_tp_group() if reason is None else None
    if group is not None and not one_host(group):
        reason = "the tensor-parallel ranks are on several hosts"
    if reason is not None or group is None:
        logger.info("iris-tp: off, vLLM's own kernels run (%s)", reason)
        return Installed("", 0, 0, 0), None
    hidden = hidden_size(config)
    with torch.device("cpu"):  # vLLM builds a model with its GPU as the default device
        ctx = iris.iris(heap_size=HEAP_BYTES, group=group.device_group)
        row_limit = min(most_rows(group.world_size, hidden, has_mixtures(config)), graph_rows(config))
        ctx.ccl.reserve_norm(row_limit, hidden, torch.bfloat16)
    installed = Installed(group.unique_name, group.world_size, min(FEW_ROWS, row_limit), row_limit)
    _compare(installed, group.cpu_group)
    ops.serve(group.unique_name, ctx)
    if experts.mixture_class() is not None:
        experts.define()
    if ctx.device.type == "cuda":
        watch.start(ctx, logger)
    compilation = config.compilation_config
    last = (compilation.compile_ranges_endpoints or [0])[-1]
    borders = {each for each in (installed.few_rows, installed.most_rows) if each < last}
    compilation.compile_ranges_endpoints = sorted({*(compilation.compile_ranges_endpoints or ()), *borders})
    if ctx.cur_rank == 0:
        logger.info(
            "iris-tp %s: up to %d rows, all-reduces of group %s run with their products, up to %d with their norms "
            "(heap %d MiB; IRIS_TP_VLLM=0 switches this off)",
            __version__, installed.most_rows, installed.group, installed.few_rows, HEAP_BYTES >> 20,
        )  # fmt: skip
    captured = captured_rows(config, installed.most_rows)
    few, many = ([n for n in captured if (n <= installed.few_rows) == is_few] for is_few in (True, False))
    preparation = Preparation(ctx, group.unique_name, group.cpu_group, few, many, attention_widths(config), logger)
    return installed, preparation


def attention_widths(config: VllmConfig) -> list[int]:
    """Return the outputs on a rank of the product of queries, keys and values."""
    model, parallel = config.model_config, config.parallel_config
    if model is None:
        return []
    heads = model.get_num_attention_heads(parallel) + 2 * model.get_num_kv_heads(parallel)
    return [heads * model.get_head_size()]


def graph_rows(config: VllmConfig) -> int:
    """Return the most rows that vLLM replays from a CUDA graph. Beyond, the host launches each kernel and is the limit.

    Where vLLM captures no graphs at all, the host is the limit at every size, so none is excluded.
    """
    compilation = config.compilation_config
    if compilation.cudagraph_mode == CUDAGraphMode.NONE:
        return max(ROWS)
    return min(compilation.max_cudagraph_capture_size or max(ROWS), max(ROWS))


def captured_rows(config: VllmConfig, most: int) -> list[int]:
    """Return the numbers of rows up to `most` with which layers run.

    They are those of vLLM's CUDA graphs, for it fills up smaller batches. Without graphs they may be any, of which
    these are a choice; another's kernel compiles at its first call.
    """
    sizes = config.compilation_config.cudagraph_capture_sizes
    if config.compilation_config.cudagraph_mode == CUDAGraphMode.NONE or not sizes:
        sizes = [1 << i for i in range(most.bit_length())]
    return [rows for rows in {*sizes, most} if rows <= most]


def _compare(installed: Installed, group: dist.ProcessGroup) -> None:
    own = json.dumps(installed.settings(), sort_keys=True)
    settings: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(settings, own, group=group)
    for rank, other in enumerate(settings):
        if other != own:
            raise ArgumentError(
                f"iris-tp's settings are {own} on this rank and {other} on rank {rank}; expected equal ones"
            )
