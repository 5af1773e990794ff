"""Plans of collectives explain themselves: each variant with its times, or the reason against it."""

from __future__ import annotations

import random
import re

import iris
from iris.ccl import Config
from iris.ccl.plan import plan
from iris.ccl.problem import ALL_GATHER, ALL_REDUCE, OPS, Problem
from iris.ccl.ways import WAYS
from iris.errors import ArgumentError
from iris.machines import machine_named
import pytest
import torch

from tests.harness import run_ranks

H200 = machine_named("NVIDIA H200", 132).links
ROW = re.compile(r"(\w+, \w+) +link +([\d.]+) us, together +([\d.]+) us")


def explained(op: str, n: int, ranks: int, config: Config | None = None, dtype: torch.dtype = torch.bfloat16):
    part = 0 if op == ALL_REDUCE else n if op == ALL_GATHER else -(-n // ranks)
    return plan(Problem(op, n, part, 0, dtype, ranks), config or Config(), H200, explained=True)


@pytest.mark.parametrize("op", OPS)
def test_each_way_of_an_op_is_compared_or_has_a_reason(op: str) -> None:
    rng = random.Random(op)
    for _ in range(30):
        chosen = explained(
            op, rng.randrange(1, 1 << 24), rng.choice((1, 2, 4, 8)), dtype=rng.choice((torch.float16, torch.int64))
        )
        first, source, *lines, last = chosen.explain().splitlines()
        assert (
            first.startswith(f"{op} of ") and first.endswith(" on NVIDIA H200") and source == "rates measured on H200s"
        )
        rows = [match for line in lines if (match := ROW.match(line))]
        others = [line for line in lines if not ROW.match(line)]
        assert len(lines) == sum(op in way.ops for way in WAYS)
        assert all(re.match(r"rejected \w+, \w+: \w|left out \w+, \w+, [\d.]+ us: \w", line) for line in others), others
        times = [float(row[3]) for row in rows]
        assert times == sorted(times) and abs(times[0] - chosen.expected_us) < 0.06
        assert last == f"chosen {rows[0][1]}" == f"chosen {chosen.variant}, {chosen.protocol}"


def test_a_config_is_a_reason() -> None:
    lines = explained(ALL_REDUCE, 4096, 8, Config(protocol="flags", all_reduce_variant="ring")).reasons
    assert lines[-1] == "chosen ring, flags"
    assert any(
        re.match(r"left out two_shot, flags, .* us: config.all_reduce_variant is 'ring'", line) for line in lines
    )
    lines = explained(ALL_GATHER, 4096, 8, Config(protocol="flags")).reasons
    assert any(re.match(r"left out two_shot, lamport, .* us: config.protocol is 'flags'", line) for line in lines)
    assert "rejected two_shot, lamport: no Lamport value is a wider integer" in (
        explained(ALL_GATHER, 4096, 8, dtype=torch.int64).reasons
    )


def test_reasons_do_not_tell_plans_apart() -> None:
    silent = plan(Problem(ALL_REDUCE, 64, 0, 0, torch.float32, 2), Config(), H200)
    chosen = explained(ALL_REDUCE, 64, 2, dtype=torch.float32)
    assert silent.reasons == () and chosen.reasons and silent == chosen and repr(silent) == repr(chosen)


def explain(ctx: iris.Iris) -> str:
    out = ctx.zeros(100, dtype=torch.float32)
    before = ctx.heap.used
    plans = ctx.ccl.plan(ALL_REDUCE, out, out), ctx.ccl.plan(ALL_REDUCE, out, out, explained=False)
    assert plans[0] == plans[1] and plans[1].explain() == "" and ctx.heap.used == before
    with pytest.raises(ArgumentError, match="op is 'sum'"):
        ctx.ccl.plan("sum", out, out)
    return plans[0].explain()


def test_a_context_explains_a_call() -> None:
    texts = run_ranks(2, explain)
    assert texts[0] == texts[1] and texts[0].startswith(
        "all_reduce of 100 elements of torch.float32 on each of 2 ranks"
    )
