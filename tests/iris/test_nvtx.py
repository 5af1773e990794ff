"""Ranges for a profiler: named by call and shapes, closed after errors too, and absent where nobody asks for them."""

import iris
from iris import errors, nvtx
import pytest
import torch

from tests.harness import run_ranks


def _calls(ctx: iris.Iris) -> tuple[list[str], int]:
    """The ranges of a context that is made while `IRIS_NVTX=1`, with CUDA as it seems, and how many stay open."""
    names, depth = [], 0

    def push(name: str) -> None:
        nonlocal depth
        names.append(name)
        depth += 1

    def pop() -> None:
        nonlocal depth
        depth -= 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvtx, "enabled", lambda: True)
        patch.setattr(torch.cuda.nvtx, "range_push", push)
        patch.setattr(torch.cuda.nvtx, "range_pop", pop)
        A, B, out = ctx.ones(8, 16), ctx.ones(16, 32), ctx.empty(8, 32)
        for _ in range(2):  # the second call repeats the first
            ctx.ops.matmul_all_reduce(out, A, B)
        ctx.ops.plan("matmul_all_reduce", 8, 32, 16, torch.float32)
        with pytest.raises(errors.ShapeError):
            ctx.ops.matmul_all_reduce(out=out, A=B, B=A)
        ctx.ccl.all_reduce(out, out)
        assert out.eq(16 * ctx.num_ranks**2).all()
    return names, depth


def test_a_call_is_a_range_named_by_op_and_shapes() -> None:
    call = "ctx.ops.matmul_all_reduce out[8, 32] A[8, 16] B[16, 32] float32"
    refused = "ctx.ops.matmul_all_reduce out[8, 32] A[16, 32] B[8, 16] float32"
    for names, depth in run_ranks(2, _calls):
        ours = [name for name in names if name in (call, refused) or name.startswith("ctx.ccl")]
        assert ours == [call, call, refused, "ctx.ccl.all_reduce out[8, 32] inp[8, 32] float32"]
        assert depth == 0


@pytest.mark.parametrize("text, on", [("1", True), ("0", False), ("", False)])
def test_the_variable_counts_where_there_is_cuda(text: str, on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(nvtx.ENV, text)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert nvtx.enabled() is on
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not nvtx.enabled()


def test_another_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(nvtx.ENV, "yes")
    with pytest.raises(errors.PlatformError, match="IRIS_NVTX is 'yes'; expected 0, 1 or nothing"):
        nvtx.enabled()
