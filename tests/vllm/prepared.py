"""What the plug-in prepares on a GPU that is not there, for a Llama and a mixture: `python -m tests.vllm.prepared`.

Compiles nothing. Prints, as JSON, how many kernels were prepared at the sizes that vLLM captures, and those that the
layers of a step launch and that were not.
"""

from __future__ import annotations

import json
import logging
import os
from unittest import mock

os.environ["TRITON_INTERPRET"] = "0"

from tests import fake_gpu  # noqa: E402

HIDDEN, QKV, ROW_LINEARS, GATES = 4096, 6144, (4096, 14336), 2 * 14336
EXPERTS, TOP_K, WIDTH = 128, 8, 768
WORLD, EPS = 2, 1e-5
SIZES = [1, 2, 4, *range(8, 257, 8)]


def main() -> None:
    mode = fake_gpu.pretend("sm_90")
    from iris.launch import ahead
    from iris_ops.local.norm import add_rms_norm
    from iris_ops.local.skinny_matmul import skinny_matmul
    from iris_ops.planning.epilogues import GATE
    from layers.vllm import experts, ops, prepare
    from layers.vllm.limits import FEW_ROWS
    import torch

    few, many = [n for n in SIZES if n <= FEW_ROWS], [n for n in SIZES if n > FEW_ROWS]
    dtype = {"dtype": torch.bfloat16, "device": "cuda:0"}

    def new(*shape: int) -> torch.Tensor:
        return torch.empty(shape, **dtype)

    def step(rows: int) -> None:
        """Call what a layer's graph holds, as `rewrite` makes it."""
        for K in ROW_LINEARS:
            A, weight, residual, norm = new(rows, K // WORLD), new(HIDDEN, K // WORLD), new(rows, HIDDEN), new(HIDDEN)
            ops.matmul_all_reduce_rms_norm(ctx, A, weight, residual, norm, EPS)
            if rows <= FEW_ROWS:
                _, scaled, squares = ops.matmul_all_reduce_norm(ctx, A, weight, residual, norm)
                skinny_matmul(scaled, new(QKV // WORLD, HIDDEN), squares=squares, eps=EPS)
                skinny_matmul(scaled, new(GATES // WORLD, HIDDEN), epilogue=GATE.name, squares=squares, eps=EPS)
        x, weights = new(rows, HIDDEN), new(rows, TOP_K).float()
        total = experts.experts(ctx, x, gate_up, down, weights.to(torch.int32), weights)
        add_rms_norm(total, x, x[0], EPS)

    prepared: dict[str, ahead.Form] = {}
    with mode, mock.patch.object(prepare, "_without_memory", lambda like, shape: like.new_empty(shape)):
        ctx = fake_gpu.fake_rank(WORLD, 0)
        gate_up, down = new(EXPERTS, 2 * WIDTH // WORLD, HIDDEN), new(EXPERTS, HIDDEN, WIDTH // WORLD)
        preparation = prepare.Preparation(ctx, "tp:0", None, few, many, [QKV // WORLD], logging.getLogger())
        with mock.patch.object(preparation, "_compile", prepared.update):
            for K in ROW_LINEARS:
                preparation.add(new(HIDDEN, K // WORLD))
            assert preparation.add_experts(gate_up, down, TOP_K)
        needed = ahead.recorded([ctx], lambda: [step(rows) for rows in SIZES])
    missing = sorted({form.name for name, form in needed.items() if name not in prepared})
    print("RESULT", json.dumps({"prepared": len(prepared), "needed": len(needed), "missing": missing}))


if __name__ == "__main__":
    main()
