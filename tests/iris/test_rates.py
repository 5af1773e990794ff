"""Measured rates in the user's cache: written, read, refused, and the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
import json
import os
from pathlib import Path

import iris
from iris import rates
from iris.errors import PlatformError
from iris.machines import INTERPRETER, Machine, calibrated, machine_named
from iris_ops.planning.plan import plan
from iris_ops.problem import ALL_REDUCE, Request, requested_problem
import pytest
import torch

from tests.harness import UNDER_TORCHRUN
from tests.processes import run_fresh

pytestmark = pytest.mark.skipif(UNDER_TORCHRUN, reason="processes of its own")
H200 = machine_named("NVIDIA H200", 132)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(rates.ENV_RATES)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def table(machine: Machine = H200, collectives: dict[str, float] | None = None, **measured: float) -> rates.Table:
    versions = {"iris-tp": "0.1.0"}
    return rates.Table(
        machine.name, machine.num_programs, 2, "2026-11-28", versions, measured, collectives or {}, {"copy": 1.0}
    )


def test_a_table_is_read_as_it_was_written(cache: Path) -> None:
    assert rates.read(H200.name, 132) is None
    written = table(hbm_gbs=3900.5, tflops=701, collectives={"hop_us": 2.25, "enter_us": 0})
    path = rates.write(written)
    assert path == cache / "iris-tp" / "rates" / "nvidia-h200.json" and list(path.parent.iterdir()) == [path]
    assert rates.read(H200.name, 132) == (written, path)


def test_a_table_changes_plans_which_name_its_file() -> None:
    problem = requested_problem(Request(ALL_REDUCE, 256, 8192, 2048, 2, torch.bfloat16))
    before = plan(problem, calibrated(H200))
    path = rates.write(table(hbm_gbs=4000.0, link_gbs=12.0, collectives={"link_gbs": 11.0, "pair_gbs": 10.0}))
    machine = calibrated(H200)
    after = plan(problem, machine)
    assert machine.hbm_gbs == 4000.0 and machine.launch_us == H200.launch_us
    assert machine.links.link_gbs == 11.0 and machine.links.name == H200.name
    assert machine.links.lamport_gbs == H200.links.lamport_gbs, "what the table lacks is as in the source"
    assert after != before and after.prediction.total_us > 5 * before.prediction.total_us
    assert f"rates measured with 2 GPUs on 2026-11-28 by iris-tp calibrate, {path}" in after.explain().splitlines()
    assert "rates measured on H200s" in before.explain().splitlines()
    assert machine.digest != H200.digest == replace(H200, source="elsewhere").digest


def test_a_table_of_products_separates_ours_from_torchs() -> None:
    """Where torch multiplies twice as fast, plans let it multiply."""
    problem = requested_problem(Request(ALL_REDUCE, 6144, 8192, 8192, 2, torch.bfloat16))
    assert "hopper" in plan(problem, calibrated(H200)).kernel
    rates.write(table(library_tflops=1480.0))
    assert plan(problem, calibrated(H200)).kernel == "with_torch.sequential"


def test_the_environment_names_a_file_or_the_data_sheet(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates.write(table(hbm_gbs=3000.0))
    monkeypatch.setenv(rates.ENV_RATES, "data-sheet")
    assert calibrated(H200) == H200
    with pytest.raises(PlatformError, match="IRIS_RATES is 'data-sheet', which ignores measured rates; unset it"):
        rates.check_writable(H200.name)
    monkeypatch.setenv(rates.ENV_RATES, str(cache / "mine.json"))
    with pytest.raises(
        PlatformError, match=r"IRIS_RATES is '.*mine.json', which is not a file; expected one, or 'data"
    ):
        calibrated(H200)
    rates.write(table(hbm_gbs=2000.0))
    assert calibrated(H200).hbm_gbs == 2000.0 and (cache / "mine.json").is_file()


def changed(**fields: object) -> Callable[[dict], object]:
    return lambda content: {**content, **fields}


MALFORMED = {
    "no JSON": (lambda content: "{", "it is not JSON"),
    "empty": (lambda content: "", "it is not JSON"),
    "a list": (lambda content: [content], "it holds list, expected an object"),
    "another format": (changed(format=0), "its format is 0, expected 1: another version wrote it"),
    "no format": (lambda content: {k: v for k, v in content.items() if k != "format"}, "its format is None"),
    "no rates": (lambda content: {k: v for k, v in content.items() if k != "rates"}, "rates is None, expected an obj"),
    "an unknown rate": (changed(rates={"warp_gbs": 1.0}), "rates has 'warp_gbs', expected some of tflops"),
    "zero": (changed(rates={"hbm_gbs": 0}), "hbm_gbs of rates is 0, expected a finite number greater than 0"),
    "a text": (changed(collectives={"hop_us": "1.5"}), "hop_us of collectives is '1.5', expected a finite"),
    "no number": (changed(rates={"tflops": float("nan")}), "tflops of rates is nan, expected a finite"),
    "true": (changed(rates={"tflops": True}), "tflops of rates is True"),
    "no count": (changed(ranks=True), "ranks is True, expected an integer"),
    "another GPU": (
        changed(name="NVIDIA B200"),
        r"are of NVIDIA B200 with 132 multiprocessors, and this is NVIDIA H20",
    ),
    "another size": (changed(num_programs=78), r"with 78 multiprocessors, and this is NVIDIA H200 with 132"),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_file_that_cannot_be_used_is_refused_with_its_name(kind: str) -> None:
    spoil, reason = MALFORMED[kind]
    path = rates.write(table(hbm_gbs=4000.0))
    content = spoil(json.loads(path.read_text()))
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(PlatformError, match=f"{path}.*{reason}.*; run iris-tp calibrate again, or delete the file"):
        calibrated(H200)


def test_a_file_that_cannot_be_read_or_written_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = rates.path_of(H200.name)
    path.mkdir(parents=True)
    with pytest.raises(PlatformError, match=f"{path} cannot be read: .*; run iris-tp calibrate again"):
        calibrated(H200)
    with pytest.raises(PlatformError, match=f"cannot be written to {path}: .* expected a folder that can be written"):
        rates.write(table(hbm_gbs=1.0))
    (cache / "a file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache / "a file"))
    with pytest.raises(PlatformError, match="cannot be written to .*a file.*; expected a folder that can be written"):
        rates.check_writable(H200.name)
    assert calibrated(H200) == H200


def differing(rank: int, world: int, folder: str, spoilt: bool) -> None:
    """Give the last rank a different table; with `spoilt`, one that cannot be used."""
    os.environ.pop(rates.ENV_RATES, None)
    os.environ["XDG_CACHE_HOME"] = str(Path(folder) / str(rank))
    if rank == world - 1:
        path = rates.write(table(machine_named(INTERPRETER, 1), launch_us=1.0))
        if spoilt:
            path.write_text("{}")
    expected = "interpreter.json cannot be used" if spoilt else (
        r"rates differ between ranks, .*: interpreter, rates estimated \(\w+\) on ranks 0, 1, interpreter, rates "
        r"measured with 2 GPUs on .*2/iris-tp/rates/interpreter.json \(\w+\) on rank 2; expected .* copy its file"
    )  # fmt: skip
    with pytest.raises(PlatformError, match=expected):
        iris.iris(1 << 20)
    os._exit(0)


@pytest.mark.parametrize("spoilt", [False, True])
def test_ranks_with_different_rates_make_no_context(tmp_path: Path, spoilt: bool) -> None:
    ended = run_fresh(3, differing, str(tmp_path), spoilt)
    assert [end.exitcode for end in ended] == [0, 0, 0], [end.traceback for end in ended]


def explaining(rank: int, world: int, folder: str) -> None:
    os.environ.pop(rates.ENV_RATES, None)
    os.environ["XDG_CACHE_HOME"] = folder
    with iris.iris(1 << 22) as ctx:
        x = ctx.zeros(64)
        reasons = [
            ctx.ops.plan(ALL_REDUCE, 64, 64, 64, torch.float32).explain(), ctx.ccl.plan("all_reduce", x, x).explain()
        ]  # fmt: skip
        assert all(f"rates measured with 2 GPUs on 2026-11-28 by iris-tp calibrate, {folder}" in r for r in reasons)
        assert ctx.ccl.plan("all_reduce", x, x).expected_us == pytest.approx(7.0, rel=0.1)


def test_a_context_plans_by_the_table(tmp_path: Path) -> None:
    """Its ops and its collectives, on all ranks."""
    latencies = {"launch_us": 5.0, "hop_us": 2.0, "pair_gbs": 100.0}
    rates.write(table(machine_named(INTERPRETER, 1), collectives=latencies, launch_us=7.0))
    ended = run_fresh(2, explaining, str(tmp_path))
    assert [end.exitcode for end in ended] == [0, 0], [end.traceback for end in ended]
