"""`benchmarks.all_scatter` checks what it times, sees a variant that is wrong, and its bars can be drawn."""

import json
from pathlib import Path
import sys

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # benchmarks are run from the checkout, they are not installed

from iris_tp.bench.team import Team  # noqa: E402

from benchmarks import all_scatter  # noqa: E402
from benchmarks.plots import all_scatter_plots  # noqa: E402
from tests.harness import run_ranks  # noqa: E402
from tests.processes import run_benchmark  # noqa: E402


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("all_scatter")
    printed = run_benchmark("all_scatter", 2, "--dtype", "float16", "--out", str(folder))
    return folder / "all_scatter_float16_cpu_x2.json", printed


def test_all_variants_are_right(written) -> None:
    measured = json.loads(written[0].read_text())
    (row,) = measured["rows"]
    assert {r["name"] for r in row["results"] if r["kind"] == "variant"} == set(all_scatter.VARIANTS)
    assert all(result["status"] == "ok" and result["eager_us"] > 0 for result in row["results"]), row
    assert all_scatter.render(measured) in written[1]
    sent = 64 * 96 // 2 * 2  # bytes: half of the product, of the dtype that was asked for
    assert row["link_us"] == pytest.approx(sent / all_scatter.LINK_GB_S / 1e3, rel=0.01)


def test_bars_show_every_contender(written, tmp_path: Path) -> None:
    picture = all_scatter_plots.draw(written[0], tmp_path)[0].read_text()
    assert all(name in picture for name in (*all_scatter.VARIANTS, "ctx.ops", "64, 96, 64"))


def _an_element_lost(ctx) -> list:
    inputs = all_scatter.Inputs(Team(ctx.cur_rank, ctx.num_ranks, ctx.device), ctx, 64, 64, 64, torch.float32)
    variant = next(c for c in inputs.contenders() if c.name == "fused_sequential")
    found = []
    for lost in (False, True):
        result = {}

        def act(lost: bool = lost) -> None:
            variant.call(0)
            if lost and ctx.cur_rank == 1:
                variant.out[-1, -1] = float("nan")

        found.append((all_scatter.right(inputs.team, inputs, variant, act, result), result.get("status")))
    return found


def test_a_lost_element_is_seen_on_all_ranks() -> None:
    for found in run_ranks(2, _an_element_lost):
        assert found == [(True, None), (False, "wrong: inf times the allowed error")]
