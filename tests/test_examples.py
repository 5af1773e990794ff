"""Every example runs with the command of its docstring; a rank that fails ends the run at once."""

import importlib
import os
from pathlib import Path
import signal
import socket
import subprocess
import sys
import time

from iris_tp import launch
import pytest
import torch
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from examples.all_scatter import common
from tests.harness import run_ranks
from tests.processes import patient

ROOT = Path(__file__).parents[1]
# In ranks that are there already: (module, ranks). Starting processes for each would take most of the time.
SCATTERS = ("bulk_synchronous", "producer_consumer", "fused_sequential", "fused_specialized")
IN_WORKERS = {
    "atomics": 3,
    "expert_mixture": 3,
    "flash_decode": 2,
    "matmul_all_reduce": 3,
    "ring": 3,
    "ring_attention": 2,
    "rms_norm_gather": 3,
    "split_a_model": 2,
    "store_load": 3,
    "tile_all_reduce": 2,
    "message_passing": 2,
    "message_passing_put": 2,
    "message_passing_load_store": 2,
}
# The last but the workers' needs a GPU (test_gluon.py), the one before it root (hosts/test_guide.py).
TESTED_APART = ("demo", "device_mesh", "several_hosts", "tile_all_reduce_hopper", *IN_WORKERS)
EXAMPLES = sorted(p.stem for p in (ROOT / "examples").glob("[a-z]*.py") if p.stem not in TESTED_APART)


def run(*command: str, timeout: float = 240) -> str:
    result = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=patient(timeout),
        stdin=subprocess.DEVNULL,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "tracing")) for name in EXAMPLES]
)
def test_example_runs(name: str) -> None:
    assert run("-m", f"examples.{name}").strip(), "an example prints what it shows"


def _run_rank(ctx, name: str) -> None:
    importlib.import_module(f"examples.{name}").rank_main()


@pytest.mark.parametrize("name", IN_WORKERS)
def test_example_runs_in_ranks_that_are_there(name: str) -> None:
    run_ranks(IN_WORKERS[name], _run_rank, name)


def _scatter(ctx, name: str) -> None:
    common.demonstrate(importlib.import_module(f"examples.all_scatter.{name}").all_scatter)


@pytest.mark.parametrize("name", SCATTERS)
@pytest.mark.some(2)
def test_scatter_runs_in_ranks_that_are_there(name: str) -> None:
    run_ranks(3, _scatter, name)


def test_every_scatter_is_tested() -> None:
    names = {p.stem for p in (ROOT / "examples" / "all_scatter").glob("[a-z]*.py")}
    assert names - {"common", "fused_store_warp"} == set(SCATTERS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what it says without a GPU")
def test_store_warp_says_what_it_needs(capsys: pytest.CaptureFixture) -> None:
    importlib.import_module("examples.all_scatter.fused_store_warp").main()
    assert "need a Hopper GPU" in capsys.readouterr().out


@pytest.mark.slow
def test_example_runs_under_torchrun() -> None:
    printed = run("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "examples.store_load")
    assert "[0/2]" in printed and "[1/2]" in printed


@pytest.mark.slow
def test_device_mesh_over_two_hosts() -> None:
    """Two launches of torchrun on this machine simulate two hosts, each with its own GPUs if there are four."""
    enough = torch.cuda.device_count() >= 4
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    hosts = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(host)]
            + ["--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", str(port)]
            + ["-m", "examples.device_mesh"],
            cwd=ROOT,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": f"{2 * host},{2 * host + 1}" if enough else ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for host in range(2)
    ]
    try:
        printed = [host.communicate(timeout=patient(120))[0] for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    for host, text in enumerate(printed):
        assert hosts[host].returncode == 0, text
        for rank in range(2):
            assert f"[{rank}/2] group {host} of 2 answered 4 of 8 prompts" in text


def fail(how: str) -> None:
    """One rank fails while the others wait for it."""
    torch.distributed.init_process_group("gloo")
    if os.environ["RANK"] == "1":
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("a rank's own words")
    torch.distributed.barrier()
    time.sleep(60)


@pytest.mark.parametrize(
    "how, error, text",
    [("killed", ProcessExitedException, "SIGKILL"), ("raises", ProcessRaisedException, "a rank's own words")],
)
@pytest.mark.some(1)
def test_failed_rank_ends_the_run(how: str, error: type[Exception], text: str) -> None:
    start = time.monotonic()
    with pytest.raises(error, match=text):
        launch.run(fail, 3, how)
    assert time.monotonic() - start < patient(40)


def test_more_ranks_than_gpus_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert launch.default_ranks() == 2
    with pytest.raises(ValueError, match="3 ranks need 3 GPUs and this machine has 2"):
        launch.check_ranks(3)
    monkeypatch.setenv("IRIS_SHARE_GPUS", "1")
    launch.check_ranks(3)
    assert launch.default_ranks() == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="on GPUs the host has little to compute")
def test_ranks_share_the_cores_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "OMP_NUM_THREADS"
    monkeypatch.setenv(name, "7")
    with launch._threads(3):
        assert os.environ[name] == "7"
    monkeypatch.delenv(name)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    with launch._threads(3):
        assert os.environ[name] == "2"
    assert name not in os.environ


def test_no_ranks_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        launch.check_ranks(0)
