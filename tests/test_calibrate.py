"""`iris-tp calibrate`: rates are derived from times, all kinds of calls are measured, one GPU alone is refused."""

from __future__ import annotations

import argparse
from dataclasses import replace
import json
from pathlib import Path
import random

import iris
from iris import rates
from iris.ccl import Config
from iris.errors import PlatformError
from iris.machines import Machine, calibrated, machine_named, machine_of
from iris_ops.problem import OPS
from iris_tp import calibrate, rate_cases
from iris_tp.bench.team import Team
from iris_tp.rate_cases import COLLECTIVES, H200, Call, Collective, Copy, Study, TorchProduct, judged, study
import pytest
import torch

from tests.harness import ON_GPU, WORLDS, both, run_ranks

pytestmark = both
NAMES = [*rates.DEVICE_RATES, *(COLLECTIVES + name for name in rates.COLLECTIVE_RATES)]
OTHERS = ("NVIDIA A100-SXM4-80GB", "NVIDIA B200", "NVIDIA L40S", "NVIDIA H200")


def invented(rng: random.Random) -> Machine:
    """A machine whose groups of rates are 0.2 to 3 times an H200's."""
    machine = replace(H200, collectives=H200.links)
    for group in study(H200, 2).groups:
        factor = rng.uniform(0.2, 3.0)
        for rate in group.rates:
            machine = rate_cases._with(machine, rate, rate_cases._get(H200, rate) * factor)
    return machine


def times_of(machine: Machine, measured: Study, rng: random.Random, noise: float = 0.0) -> dict[str, float]:
    """What calls take on `machine`: cases by its rates over an H200's, others as they are predicted."""
    us = {name: 1.0 if isinstance(call, Copy) else call.predicted_us(machine) for name, call in measured.calls.items()}
    for group in measured.groups:
        rate = group.rates[0]
        slower = rate_cases._get(machine, rate) / rate_cases._get(H200, rate)
        us |= {case.name: case.h200_us * (slower if rate.endswith("_us") else 1 / slower) for case in group.cases}
    return {name: value * rng.uniform(1 - noise, 1 + noise) for name, value in us.items()}


@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.some(3)
def test_groups_of_rates_are_recovered_and_predict_better(name: str, world: int) -> None:
    known, rng = machine_named(name, 142), random.Random(f"{name} {world}")
    measured = study(known, world)
    assert {rate for group in measured.groups for rate in group.rates} == set(NAMES)
    determining = {case.name for group in measured.groups for case in group.cases}
    assert len(measured.judging) >= 20 and not determining & set(measured.judging)
    for _ in range(3):
        truth = invented(rng)
        us = times_of(truth, measured, rng)
        outcome = judged(known, measured, us)
        assert outcome.after < outcome.before / 2 and outcome.after < 0.12
        for group in outcome.taken:
            for rate in group.rates:
                expected = rate_cases._get(truth, rate)
                assert rate_cases._get(outcome.machine, rate) == pytest.approx(expected, rel=1e-6), rate
        for group in set(measured.groups) - set(outcome.taken):
            for rate in group.rates:
                assert rate_cases._get(outcome.machine, rate) in (
                    rate_cases._get(known, rate), rate_cases._get(replace(known, tflops=outcome.machine.tflops), rate)
                ), "as the source has it"  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_nothing_is_taken_where_the_source_predicts_as_well(name: str) -> None:
    """Even if every case differs: only calls that determine no rate count."""
    known, rng = machine_named(name, 142), random.Random(name)
    measured = study(known, 2)
    us = times_of(invented(rng), measured, rng)
    us |= {key: call.predicted_us(known) * rng.uniform(0.97, 1.03) for key, call in measured.judging.items()}
    outcome = judged(known, measured, us)
    assert not outcome.taken and outcome.before == outcome.after < 0.03
    assert replace(outcome.machine, collectives=None) == known
    text = calibrate.report(known, measured, us, outcome)
    assert (
        text.count("kept: the source's predict as well") == len(measured.groups) and "taken" not in text.split(":")[0]
    )


def test_one_wrong_case_does_not_spoil_the_others() -> None:
    """A copy that took seven times as long as it should, as in a graph: the rate of memory stays."""
    known, rng = machine_named("NVIDIA A100-SXM4-80GB", 108), random.Random(3)
    measured = study(known, 4)
    truth = replace(invented(rng), hbm_gbs=known.hbm_gbs)
    us = times_of(truth, measured, rng, noise=0.02)
    us["copy in memory"] *= 7
    outcome = judged(known, measured, us)
    assert "memory" not in [group.name for group in outcome.taken] and outcome.machine.hbm_gbs == known.hbm_gbs
    assert outcome.after < outcome.before / 2


def test_a_time_that_no_machine_takes_is_refused() -> None:
    measured = study(H200, 2)
    us = times_of(H200, measured, random.Random(1))
    for name, factor in (("all-gather of 32 MiB", 200.0), ("copy in memory", 0.005)):
        with pytest.raises(PlatformError, match=f"{name}: .* times an H200's time; expected at most 100 times"):
            judged(H200, measured, us | {name: us[name] * factor})


def test_the_table_holds_what_was_taken_and_gives_its_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known, rng = machine_named("NVIDIA A100-SXM4-80GB", 108), random.Random(7)
    measured = study(known, 4)
    us = times_of(invented(rng), measured, rng)
    outcome = judged(known, measured, us)
    monkeypatch.setenv(rates.ENV_RATES, str(tmp_path / "table.json"))
    path = rates.write(calibrate.table_of(outcome, 4, us))
    read, content = calibrated(known), json.loads(path.read_text())
    for name in NAMES:
        assert rate_cases._get(read, name) == pytest.approx(rate_cases._get(outcome.machine, name), rel=1e-3), name
    taken = {rate for group in outcome.taken for rate in group.rates}
    assert {*content["rates"], *(COLLECTIVES + name for name in content["collectives"])} == taken <= set(NAMES)
    assert content["versions"].keys() == {"iris-tp", "torch", "triton"} and content["ranks"] == 4
    assert content["measurements"].keys() == us.keys()
    text = calibrate.report(known, measured, us, outcome)
    assert all(f"{group.name}: taken" in text for group in outcome.taken) and str(known.source) in text
    assert all(f"  {name} " in text for name in NAMES)


def small(world: int) -> dict[str, Call]:
    """A call of each kind, and of each fused op, for the interpreter."""
    machine = machine_of(torch.device("cpu"))
    fused = [rate_cases._fused(machine, op, 4 * world, 32, 16, w, torch.float32) for op in OPS for w in (1, world)]
    calls: list[Call] = [
        Collective("all_reduce", 256, Config(all_reduce_variant="two_shot"), world, pairs=True),
        *fused, Copy(1 << 16), TorchProduct(32, 16, 48),
        *(Collective(op, 256, Config(), world) for op in ("all_reduce", "all_gather")),
    ]  # fmt: skip
    return {str(number): call for number, call in enumerate(calls)}


def measuring(ctx: iris.Iris, gpu: bool) -> dict[str, float]:
    team = Team(ctx.cur_rank, ctx.num_ranks, ctx.device)
    calls = study(machine_of(ctx.device), ctx.num_ranks).calls if gpu else small(ctx.num_ranks)
    with calibrate.alone(ctx, 1 << 30 if gpu else 1 << 20) as single:
        us = calibrate.Stage(team, ctx, single).measure(calls)
    assert us.keys() == calls.keys()
    return us


@pytest.mark.parametrize("world_size", [world for world in WORLDS if world > 1])
def test_calls_are_measured_on_all_ranks_alike(world_size: int) -> None:
    results = run_ranks(world_size, measuring, ON_GPU)
    assert all(result == results[0] for result in results) and all(value > 0 for value in results[0].values())
    if ON_GPU:
        known = machine_of(torch.device("cuda", 0))
        measured = study(known, world_size)
        outcome = judged(known, measured, results[0])
        assert outcome.after <= outcome.before < 0.6
        if known.name == "NVIDIA H200" and world_size == 2:  # whose times the cases know
            for group in measured.groups:
                for case in group.cases:
                    assert 0.7 < results[0][case.name] / case.h200_us < 1.4, case.name


@pytest.mark.parametrize(
    "count, ranks, reason",
    [
        (0, None, "there is no GPU; expected two or more"),
        (1, None, "there is one GPU, so there is no link to measure; expected two or more"),
        (4, 1, "--ranks is 1; expected 2 to 4, a GPU each"),
        (4, 5, "--ranks is 5; expected 2 to 4, a GPU each"),
        (3, None, "the GPUs differ: NVIDIA H100, NVIDIA H100, NVIDIA H200; expected one kind"),
    ],
)
def test_a_machine_without_links_is_refused(
    count: int, ranks: int | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = [("NVIDIA H100", 132), ("NVIDIA H100", 132), ("NVIDIA H200", 132)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(calibrate, "_gpu", lambda index: kinds[index])
    with pytest.raises(PlatformError, match=reason):
        calibrate.usable_ranks(ranks)
    code, message = calibrate.run(argparse.Namespace(ranks=ranks))
    assert code == 2 and message.startswith(reason)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two GPUs and an empty cache."""
    monkeypatch.delenv(rates.ENV_RATES, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(calibrate, "usable_ranks", lambda requested: 2)
    monkeypatch.setattr(calibrate, "_gpu", lambda index: ("NVIDIA H200", 132))
    return tmp_path


def test_a_table_is_written_or_an_earlier_one_deleted(
    machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    table = rates.Table("NVIDIA H200", 132, 2, "2026-11-28", {}, {"hbm_gbs": 4000.0}, {})

    def measured(better: bool) -> None:
        def act(body: object, ranks: int, folder: Path) -> None:
            if better:
                (folder / "table.json").write_text(rates.text_of(table))

        monkeypatch.setattr(calibrate.launch, "run_reporting", act)
        assert calibrate.run(argparse.Namespace(ranks=None)) == (0, "")

    path = machine / "cache" / "iris-tp" / "rates" / "nvidia-h200.json"
    measured(better=False)
    assert "nothing is written" in capsys.readouterr().out and not path.exists()
    measured(better=True)
    assert f"written: {path}" in capsys.readouterr().out and calibrated(H200).hbm_gbs == 4000.0
    measured(better=False)
    assert f"{path}, of an earlier run, is deleted" in capsys.readouterr().out and calibrated(H200) == H200


def test_a_failure_on_a_rank_keeps_the_earlier_table(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = rates.write(rates.Table("NVIDIA H200", 132, 2, "2026-11-28", {}, {"hbm_gbs": 4000.0}, {}))

    def failing(*_: object) -> None:
        raise calibrate.launch.RankError("PlatformError: tiny product could not be measured: no memory")

    monkeypatch.setattr(calibrate.launch, "run_reporting", failing)
    code, message = calibrate.run(argparse.Namespace(ranks=None))
    assert code == 1 and "tiny product could not be measured" in message and path.is_file()


def test_a_cache_that_cannot_be_written_is_refused_before_anything_is_measured(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (machine / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(machine / "file"))
    monkeypatch.setattr(calibrate.launch, "run_reporting", lambda *_: pytest.fail("measured"))
    code, message = calibrate.run(argparse.Namespace(ranks=None))
    assert code == 2 and "cannot be written to" in message and "nvidia-h200.json" in message
