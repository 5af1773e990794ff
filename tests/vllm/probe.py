"""A small model inside vLLM on CPUs, two ranks a stage over gloo, the plug-in on or off: `probe.py PORT on|off STAGES`.

vLLM's own compiler, passes and layers run; only its platform is one without kernels, and its all-reduce is gloo's.
Each pipeline stage has the same layers, and passes its result on as vLLM's workers do. The first rank of each stage
prints, as JSON, the operators that it called and the sum of its result for each number of rows.
"""

from __future__ import annotations

from collections import Counter
import dataclasses
import json
import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

ROWS = (1200, 8, 64, 65, 128)
HIDDEN, WIDE = 64, 128


def main(rank: int, stages: int, port: int, on: bool, cache: str) -> None:
    tp, world = 2, 2 * stages
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), VLLM_HOST_IP="127.0.0.1", GLOO_SOCKET_IFNAME="lo",
        VLLM_CACHE_ROOT=cache, VLLM_LOGGING_LEVEL="INFO", VLLM_ENABLE_V1_MULTIPROCESSING="0", IRIS_TP_VLLM=str(int(on)),
    )  # fmt: skip
    import iris  # noqa: F401 (before triton)
    from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    class OutOfPlace(DeviceCommunicatorBase):
        def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
            out = input_.clone()
            dist.all_reduce(out, group=self.device_group)
            return out

    sys.modules["probe_communicator"] = communicator = type(sys)("probe_communicator")
    communicator.OutOfPlace = OutOfPlace  # type: ignore[attr-defined]

    class Probe(CpuPlatform):
        @classmethod
        def use_custom_op_collectives(cls) -> bool:
            return True

        @classmethod
        def get_device_communicator_cls(cls) -> str:
            return "probe_communicator.OutOfPlace"

        @classmethod
        def check_and_update_config(cls, vllm_config: object) -> None: ...

        @classmethod
        def import_kernels(cls) -> None: ...

    vllm.platforms._current_platform = Probe()
    from layers.vllm import install, plugin
    import vllm._C
    import vllm._C_stable_libtorch  # noqa: F401
    from vllm.compilation.decorators import support_torch_compile
    from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode, VllmConfig, set_current_vllm_config
    from vllm.config.compilation import PassConfig
    from vllm.distributed.parallel_state import (
        get_pp_group,
        get_tp_group,
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear

    install.refusal = lambda config: None  # no model's configuration, and a tensor-parallel size of its own
    install.hidden_size = lambda config: HIDDEN
    install.attention_widths = lambda config: []
    plugin.register()
    calls = count_calls()
    fused = [f.name for f in dataclasses.fields(PassConfig) if f.name.startswith(("fuse_", "enable_"))]
    compilation = CompilationConfig(
        pass_config=PassConfig(**dict.fromkeys(fused, False), eliminate_noops=True), mode=CompilationMode.VLLM_COMPILE,
        cudagraph_mode=CUDAGraphMode.NONE, splitting_ops=[], compile_sizes=[], compile_ranges_endpoints=[ROWS[0]],
    )  # fmt: skip
    config = VllmConfig(compilation_config=compilation)
    config.parallel_config.rank = rank  # by which vLLM names its cache
    with set_current_vllm_config(config):
        init_distributed_environment(world, rank, f"tcp://127.0.0.1:{port}", rank, "gloo")
        initialize_model_parallel(tp, stages)

        def row(inputs: int, name: str) -> RowParallelLinear:
            return RowParallelLinear(
                inputs, HIDDEN, bias=False, params_dtype=torch.bfloat16, return_bias=False, prefix=name
            )

        @support_torch_compile(dynamic_arg_dims={"x": 0, "residual": 0})
        class Model(torch.nn.Module):
            def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
                super().__init__()
                self.o, self.down = row(HIDDEN, "o"), row(WIDE, "down")
                self.first, self.second = (RMSNorm(HIDDEN, 1e-5, dtype=torch.bfloat16) for _ in range(2))
                self.up = MergedColumnParallelLinear(
                    HIDDEN, [WIDE, WIDE], bias=False, params_dtype=torch.bfloat16, return_bias=False, prefix="up"
                )
                self.last = row(HIDDEN, "last")

            def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
                x, residual = self.first(self.o(x), residual)
                gate, partner = self.up(x).chunk(2, -1)
                x, residual = self.second(self.down(torch.nn.functional.silu(gate) * partner), residual)
                return self.last(x[:, : HIDDEN // tp].contiguous()) + residual

        model = Model(vllm_config=config)
        for i, p in enumerate(model.parameters()):
            p.data = (0.2 * torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * i))).to(p.dtype)
        for layer in (model.o, model.up, model.down, model.last):
            layer.cpu_linear = torch.nn.functional.linear
        calls.clear()  # of layers that were prepared
        by_rows = {}
        for rows in ROWS:
            generator = torch.Generator().manual_seed(100 * rows + rank)
            x = torch.randn(rows, HIDDEN // tp, generator=generator).bfloat16()
            residual = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(rows)).bfloat16()
            if not get_pp_group().is_first_rank:
                received = get_pp_group().recv_tensor_dict(all_gather_group=get_tp_group())
                residual = received["residual"]
                x = residual.chunk(tp, 1)[get_tp_group().rank_in_group].contiguous()
            with set_forward_context(None, config), torch.no_grad():
                out = model(x, residual)
            if not get_pp_group().is_last_rank:
                get_pp_group().send_tensor_dict({"residual": out}, all_gather_group=get_tp_group())
            by_rows[rows] = {"calls": dict(calls), "digest": out.double().sum(0).tolist()}
            calls.clear()
    if get_tp_group().rank_in_group == 0:
        result = {"stage": rank // tp, "layer": type(model.o).__name__, "rows": by_rows}
        print("RESULT", json.dumps(result | {"ranges": compilation.compile_ranges_endpoints}))
    dist.barrier()
    os._exit(0)  # without the context's own end, which vLLM does not give it either


def count_calls() -> Counter[str]:
    """The plug-in's operators, by how often each ran."""
    from layers.vllm import ops

    calls: Counter[str] = Counter()
    for name, function in list(ops._kernels.items()):

        def counted(*args: object, name: str = name, function=function) -> object:  # noqa: ANN001
            calls[name] += 1
            return function(*args)

        ops._kernels[name] = counted
    return calls


if __name__ == "__main__":
    cache = os.environ.get("PROBE_CACHE") or tempfile.mkdtemp(prefix="vllm-probe-")
    stages = int(sys.argv[3])
    mp.spawn(main, (stages, int(sys.argv[1]), sys.argv[2] == "on", cache), nprocs=2 * stages)
