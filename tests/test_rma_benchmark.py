"""`benchmarks.rma` moves what it says, sees a word that is wrong, and its figures can be drawn."""

import json
from pathlib import Path
import sys

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # benchmarks are run from the checkout, they are not installed

from iris_tp.bench.team import Team  # noqa: E402

from benchmarks import rma  # noqa: E402
from benchmarks.plots import rma_plots  # noqa: E402
from benchmarks.rma import Case  # noqa: E402
from benchmarks.tables import rma_table  # noqa: E402
from tests.harness import run_ranks  # noqa: E402
from tests.processes import run_benchmark  # noqa: E402

OPS = ("load", "store", "copy", "atomic_cas")  # the command's run; each begins or ends at another rank


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("rma")
    printed = run_benchmark("rma", 3, "--quick", "--ops", ",".join(OPS), "--out", str(folder))
    return folder / "rma_cpu_x3.json", printed


def test_every_pair_and_all_at_once_are_right(written) -> None:
    report = json.loads(written[0].read_text())
    assert all(case["status"] == "ok" and case["us"] > 0 for case in report["cases"])
    pairs = {(a, b) for a in range(3) for b in range(3) if a != b}
    for op in OPS:
        cases = [case for case in report["cases"] if case["op"] == op]
        assert {(c["caller"], c["peer"]) for c in cases} == {(None, None), *pairs}, op
    assert {(trip["caller"], trip["peer"]) for trip in report["round_trips"]} == pairs
    assert rma_table.render(report) in written[1]


def test_pictures_show_every_pair(written, tmp_path: Path) -> None:
    pairs, rates = rma_plots.draw(written[0], tmp_path)
    assert all(f"{op}, GB/s, 64 KiB" in pairs.read_text() for op in OPS[:3])
    assert "round trip" in pairs.read_text() and "programs" in rates.read_text()


def test_cases_cover_what_is_promised() -> None:
    args = rma.parse(["--device", "cpu", "--ranks", "4"])
    args.device = "cuda"
    found = [case for group in rma.cases(args, world=4, most=132) for case in group]
    assert len(found) == len(set(found))
    for op in rma.TRANSFERS:
        together = {(case.nbytes, case.programs) for case in found if case.op == op and case.caller is None}
        sizes, programs = {4 << (10 + 2 * i) for i in range(10)}, {1, 2, 4, 8, 16, 32, 64, 128, 132}
        assert together == {(n, p) for n in sizes for p in programs}
        assert {case.nbytes for case in found if case.op == op and (case.caller, case.peer) == (2, 1)} == sizes


def _a_word_lost(ctx) -> list[int]:
    """Wrong words of each operation when it is as it should be, and when one program too few runs."""
    args = rma.parse(["--device", "cpu", "--ranks", "2"])
    memory = rma.Memory(Team(ctx.cur_rank, ctx.num_ranks, ctx.device), args, ctx)
    found = []
    for op in ("load", "store", "get", "put", "atomic_xor"):
        case = Case(op, 1 << 16, 1)
        found.append(memory.wrong_words(case))
        start = memory.start
        memory.start = lambda case: start(Case(case.op, case.nbytes - 4, 1))  # noqa: B023
        found.append(memory.wrong_words(case))
        memory.start = start
    return found


def test_a_lost_word_is_seen() -> None:
    for found in run_ranks(2, _a_word_lost):
        assert found == [0, 1] * 5
