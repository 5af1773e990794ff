"""In fp16 a rank's part that is out of range is named in debug mode, even where the sum over ranks fits."""

from __future__ import annotations

import iris
import pytest
import torch

from tests.harness import UNDER_TORCHRUN
from tests.processes import run_fresh


def warned(rank: int, world: int) -> list[str]:
    with iris.iris(1 << 24) as ctx:
        lines: list[str] = []
        ctx.log.warning = lines.append
        sign = 1 if rank == 0 else -1
        out, B = ctx.empty(4, 8, dtype=torch.float16), torch.ones(8, 8, dtype=torch.float16)
        for value in (1.0, 12000.0 * sign):  # parts of 8 and of 96000
            ctx.ops.matmul_all_reduce(out, torch.full((4, 8), value, dtype=torch.float16), B)
        return lines


@pytest.mark.skipif(UNDER_TORCHRUN, reason="processes of its own")
@pytest.mark.parametrize("debug", ["0", "1"])
def test_a_part_out_of_range_is_named_in_debug_mode(debug: str) -> None:
    ended = run_fresh(2, warned, env={"IRIS_DEBUG": debug})
    assert [end.exitcode for end in ended] == [0, 0], [end.traceback for end in ended]
    for end in ended:
        assert len(end.result) == int(debug)
        assert all("matmul_all_reduce: out holds inf or nan" in line and "65504" in line for line in end.result)
