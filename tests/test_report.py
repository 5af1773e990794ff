"""Tables show how old they are: digests of kernels and plans, their marks, and the pages that show them."""

from __future__ import annotations

from collections.abc import Iterator
import json
from pathlib import Path

from iris.machines import machine_named
from iris_ops.planning.plan import plan
from iris_ops.problem import Request, requested_problem
import pytest
import torch

from benchmarks import ops
from benchmarks.measuring import freshness, report
from benchmarks.tables import marks, model_tables, page_tables, pages


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


def test_a_row_whose_plan_is_another_says_so() -> None:
    """Where files of the plans have changed, but the row is planned as before, nothing has."""
    sizes = dict(M=64, N=8192, K=2048)
    problem = requested_problem(Request("matmul_all_reduce", *sizes.values(), 2, torch.bfloat16, None))
    now = plan(problem, machine_named("NVIDIA H200", 132), explained=False)
    recorded = {field: getattr(now, field) for field in ("kernel", *marks._FIELDS)}
    for plan_of_row, mark in ((recorded, "no"), ({**recorded, "block_n": 8}, "plan")):
        result = {"name": "ours", "kind": "ours", "status": "ok", "plan": plan_of_row}
        row = {"op": "ar", **sizes, "results": [result]}
        run = {"benchmark": "ops", "gpu": "NVIDIA H200", "world": 2, "dtype": "bfloat16", "rows": [row]}
        run["code"] = {**freshness.recorded(run), "plans": "others"}
        assert marks.changed(run, row) == mark


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


def test_a_sentence_with_figures_stays_in_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {"cost": "2 %", "rows": "|"}
    targets = [(name, "README.md", lambda _, text=text: text) for name, text in made.items()]
    monkeypatch.setattr(pages, "TARGETS", targets)
    text = "It is <!-- cost -->1 %<!-- end --> more.\n<!-- rows -->\n\n<!-- end -->\n"
    assert pages.rendered("README.md", text) == text.replace("1 %", "2 %").replace("\n\n", "\n|\n")


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for results, which are not kept in mind beyond the test."""
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    for kept in (marks.run_of, marks._changes):
        kept.cache_clear()
    yield tmp_path
    for kept in (marks.run_of, marks._changes):
        kept.cache_clear()


def measure_llm(folder: Path, gpu: str, day: int, rows: dict[tuple[int, int], dict[str, float]], code: bool) -> None:
    """A result file of Llama-3-8B; of each batch and prompt what a step takes, and half as much a first token."""
    run = {"benchmark": "llm_llama-3-8b_compiled", "model": "llama-3-8b", "layers": 32, "world": 2, "dtype": "bfloat16"}
    run |= {"gpu": f"NVIDIA {gpu.upper()}", "date": f"2026-01-{day:02}", "versions": {"torch": "2"}, "rows": []}
    run |= {"code": {"llm": "others"}} if code else {}
    for (batch, prompt), times in rows.items():
        results = [
            {"key": key, "name": key, "status": "ok", "step_graph_ms": ms, "first_graph_ms": ms / 2}
            for key, ms in times.items()
        ]
        run["rows"].append({"batch": batch, "prompt": prompt, "results": results})
    (folder / f"llm_llama-3-8b_compiled_{gpu}_x2.json").write_text(json.dumps(run))


def cells_of(table: str) -> list[list[str]]:
    """The rows of a table below its rule, without the mark in the last column."""
    lines = [line.split("|")[1:-2] for line in table.splitlines() if line.startswith("|")]
    return [list(map(str.strip, line)) for line in lines[2:]]


def test_a_row_that_a_newer_run_does_not_have_stays_with_its_gpu(results: Path) -> None:
    """vLLM's time on another GPU, with that GPU's name, fills a cell that was not measured on this one."""
    ours, vllm = {"ours": 2.0, "nccl": 3.0}, {"vllm": 5.0}
    measure_llm(results, "h100", 2, {(1, 128): ours | vllm, (64, 128): ours}, code=True)
    measure_llm(
        results, "h200", 1, {(1, 128): {"ours": 1.0, "vllm": 1.5}, (64, 128): ours | vllm, (16, 128): ours}, code=True
    )
    mine, nccl, theirs = ["2.00", "1.00"], ["3.00 (1.50x)", "1.50 (1.50x)"], ["5.00 (2.50x)", "2.50 (2.50x)"]
    expected = [
        ["Llama-3-8B, H100", "1 x 128", mine[0], nccl[0], theirs[0], mine[1], nccl[1], theirs[1]],
        ["", "64 x 128", mine[0], nccl[0], f"H200: {theirs[0]}", mine[1], nccl[1], f"H200: {theirs[1]}"],
        ["Llama-3-8B, H200", "16 x 128", mine[0], nccl[0], "", mine[1], nccl[1], ""],
    ]
    table = model_tables.models(2, "")
    assert cells_of(table) == expected
    assert "2 x NVIDIA H100" in table and "2 x NVIDIA H200" in table
    # README has a row's GPUs in a column of its own
    assert [row[1] for row in cells_of(page_tables.summary(""))] == ["2 x H100", "2 x H100", "2 x H200"]
