"""Tables say how old they are: digests of kernels and plans, the marks made of them, and the pages that show them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from iris_ops.planning.machine import machine_named
from iris_ops.planning.plan import plan
from iris_ops.problem import problem_asked
import pytest
import torch

from benchmarks import again, ccl, llm, norms, ops, rma
from benchmarks.measuring import freshness, report
from benchmarks.report import main
from benchmarks.tables import docs_tables, marks, pages

KERNELS = "iris_ops/kernels"


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A checkout of a kernel that imports a module of device code and one of the host."""
    files = {
        "iris_ops/kernels/__init__.py": "",
        "iris_ops/kernels/a_kernel.py": "from . import steps\nfrom iris import host\nfrom iris.device import waits\n",
        "iris_ops/kernels/other.py": "x = 1\n",
        "iris_ops/kernels/steps.py": '"""What it does."""\n\n\ndef step():\n    return 1  # a step\n',
        "iris/device/waits.py": "def wait():\n    return 2\n",
        "iris/host.py": "y = 1\n",
        "iris_ops/planning/plan.py": "z = 1\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(freshness, "ROOT", tmp_path)
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    for kept in (freshness.digest, freshness._imports_of_file, freshness._code_of_file, marks._changes):
        kept.cache_clear()


def run_of(kernel: str = "a_kernel", **plan: object) -> dict:
    result = {"name": "ours", "kind": "ours", "status": "ok", "plan": {"kernel": kernel, **plan}}
    return {"benchmark": "ops", "rows": [{"op": "ar", "M": 64, "N": 8192, "K": 2048, "results": [result]}]}


@pytest.mark.parametrize(
    "file, text, changed",
    [
        ("iris_ops/kernels/steps.py", '"""Other words."""\n# why\n\ndef step():\n    return 1\n', []),
        ("iris_ops/kernels/steps.py", "def step():\n    return 3\n", ["a_kernel"]),
        ("iris/device/waits.py", "def wait():\n    return 3\n", ["a_kernel"]),
        ("iris/host.py", "y = 2\n", []),
        ("iris_ops/kernels/other.py", "x = 2\n", []),
        ("iris_ops/planning/plan.py", "z = 2\n", ["plans"]),
    ],
)
def test_a_change_marks_what_was_made_by_it(tree: Path, file: str, text: str, changed: list[str]) -> None:
    run = run_of()
    run["code"] = freshness.recorded(run)
    assert set(run["code"]) == {"a_kernel", "plans"} and freshness.changes(run) == []
    (tree / file).write_text(text)
    forget()
    assert freshness.changes(run) == changed


def test_a_kernel_that_is_gone_has_changed_and_what_has_no_digest_is_unknown(tree: Path) -> None:
    run = run_of()
    assert freshness.changes(run) == [freshness.UNKNOWN] and marks.changed(run) == "unknown"
    run["code"] = freshness.recorded(run)
    (tree / KERNELS / "a_kernel.py").unlink()
    forget()
    assert freshness.changes(run) == ["a_kernel"]
    assert marks.changed(run, run["rows"][0]) == "kernel" and marks.changed(run) == "kernels"


def test_a_row_whose_plan_is_another_says_so() -> None:
    """Where files of the plans have changed, but the row is planned as before, nothing has."""
    sizes = dict(M=64, N=8192, K=2048)
    problem = problem_asked("matmul_all_reduce", *sizes.values(), 2, torch.bfloat16, None)
    now = plan(problem, machine_named("NVIDIA H200", 132), explained=False)
    recorded = {field: getattr(now, field) for field in ("kernel", *marks._FIELDS)}
    for plan_of_row, mark in ((recorded, "no"), ({**recorded, "block_n": 8}, "plan")):
        result = {"name": "ours", "kind": "ours", "status": "ok", "plan": plan_of_row}
        row = {"op": "ar", **sizes, "results": [result]}
        run = {"benchmark": "ops", "gpu": "NVIDIA H200", "world": 2, "dtype": "bfloat16", "rows": [row]}
        run["code"] = {**freshness.recorded(run), "plans": "others"}
        assert marks.changed(run, row) == mark


def test_kernels_of_plans_are_found_in_the_tree() -> None:
    names = ("hopper.lamport_pair_scatter", "lamport_matmul", "with_torch.sequential", "fp8.lamport_stream")
    for name in names:
        assert freshness._file(freshness.module_of(name)), name
    # torch's product is followed by a collective of the context
    assert "iris.ccl.lamport" in freshness._reached(freshness.beginnings_of("with_torch.sequential"))
    assert "iris.ccl.lamport" not in freshness._reached(freshness.beginnings_of("lamport_matmul"))


def test_results_keep_digests_and_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IRIS_COMMIT", "abc")
    assert freshness.commit() == "abc"
    run = {**run_of("lamport_matmul"), "dtype": "bfloat16", "gpu": "H", "world": 2}
    report.write(run, ops.parse(["--device", "cpu", "--out", str(tmp_path)]))
    assert run["code"] == freshness.recorded(run) and set(run["code"]) == {"lamport_matmul", "plans"}


def test_a_table_without_a_place_is_told() -> None:
    name, page, _ = pages.TARGETS[0]
    with pytest.raises(LookupError, match=f"{page}: expected <!-- {name} -->"):
        pages.rendered(page, "a page without it")


def test_a_rival_that_is_newly_ahead_is_in_the_table_without_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docs_tables, "_REASONS", {})
    assert docs_tables.UNEXPLAINED in docs_tables.lost(now=True)


@pytest.mark.parametrize("step", again.STEPS, ids=lambda step: step.key)
def test_every_step_of_measuring_anew_is_a_command(step: again.Step, tmp_path: Path) -> None:
    line = again.line_of(step, "h100", 2, tmp_path, 30)
    parsers = {"ops": ops, "norms": norms, "ccl": ccl, "llm": llm, "rma": rma}
    options = [*line[3:], "--device", "cpu"]
    if "--modes" in options:
        options[options.index("--modes") + 1] = "eager"  # for CPUs have no graphs
    args = parsers[line[2].partition(".")[2]].parse(options)
    assert args.ranks == 2 and args.out == tmp_path and args.name.endswith("h100_x2")


def test_what_has_no_table_is_told(tmp_path: Path) -> None:
    (tmp_path / "soak.json").write_text('{"benchmark": "soak"}')
    with pytest.raises(SystemExit, match="benchmark is soak; expected one of ops, "):
        main([str(tmp_path / "soak.json")])
