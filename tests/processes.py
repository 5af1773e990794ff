"""Processes forked from a server that has torch and triton imported, so that one costs a fraction of a second.

`run_fresh` is for bodies that make their context or die on purpose, `run_benchmark` for the benchmarks' own commands;
the workers of `harness.py` are forked so, too. `outcomes.py` has how results come back.

`run_apart` starts an interpreter for each rank instead, as torchrun, mpirun and srun do: ranks then share no hash seed,
and each ends as a program ends.
"""

from __future__ import annotations

from collections.abc import Callable
import contextlib
import ctypes
from dataclasses import dataclass
import faulthandler
import gc
import importlib
import io
import multiprocessing as mp
from multiprocessing.connection import Connection
import os
from pathlib import Path
import pickle
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import iris  # noqa: F401  # before triton on a machine without a GPU
import torch

from tests.outcomes import Failure, attempt, dumps

ENV_START = "IRIS_TEST_START"  # "spawn" where a process that is forked cannot use the GPU
ROOT = Path(__file__).resolve().parents[1]


def forkserver() -> Any:
    """Return the multiprocessing context whose server has imported what every rank needs."""
    for name, value in _child_environment().items():
        os.environ.setdefault(name, value)
    context = mp.get_context(os.environ.get(ENV_START, "forkserver"))
    if context.get_start_method() != "forkserver":
        return context
    models = ["tests.layers.preloaded"] if "tests.layers" in sys.modules else []  # takes seconds
    context.set_forkserver_preload(["tests.preloaded", *models])
    return context


def patient(seconds: float) -> float:
    """Return how long to wait for work of at most `seconds` on an idle machine: longer on a busy one."""
    return seconds * max(1.0, 2 * os.getloadavg()[0] / (os.cpu_count() or 1))


def python_path() -> str:
    """Return PYTHONPATH by which a process in any folder finds what is in this one."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def _child_environment() -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": python_path(),
    }


def prepare_process(stacks: str | None = None) -> None:
    """End this process with its parent, limit it to one thread, and report its stacks on SIGUSR1."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    save_time()
    if stacks:
        faulthandler.register(signal.SIGUSR1, file=open(stacks, "w"), all_threads=False)  # noqa: SIM115


def save_time() -> None:
    """Collect garbage seldom, and let threads not wait for each other: cores are few."""
    gc.set_threshold(20_000, 10, 10)
    torch.set_num_threads(1)


@dataclass(frozen=True)
class Ended:
    """How a process of `run_fresh` ended."""

    exitcode: int | None  # negative: the signal that killed it; None: killed after the time-out
    result: Any = None
    error: BaseException | None = None
    traceback: str = ""


def run_fresh(
    world_size: int,
    body: Callable[..., Any],
    *args: Any,
    env: dict[str, str | None] | None = None,
    timeout: float = 60.0,
) -> list[Ended]:
    """Run `body(rank, world_size, *args)` in new processes without a context; return how each ended, and raise nothing.

    The environment is torchrun's for that rank, changed by `env` (None removes a variable).
    """
    context = forkserver()
    port = free_port()
    processes, pipes = [], []
    for rank in range(world_size):
        ours, theirs = context.Pipe(duplex=False)
        variables = {**_torchrun_variables(rank, world_size, port), **(env or {})}
        message = dumps((body, (rank, world_size, *args)))
        process = context.Process(target=_fresh, args=(message, variables, theirs), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    deadline = time.monotonic() + patient(timeout)
    ended = []
    for process, pipe in zip(processes, pipes, strict=True):
        outcome = None
        if pipe.poll(max(0.0, deadline - time.monotonic())):
            with contextlib.suppress(EOFError, OSError):
                outcome = pickle.loads(pipe.recv_bytes())
        process.join(max(0.0, deadline - time.monotonic()))
        code = process.exitcode
        if code is None:
            process.kill()
            process.join(10)
        if isinstance(outcome, Failure):
            ended.append(Ended(code, None, outcome.error, outcome.text))
        else:
            ended.append(Ended(code, outcome))
        pipe.close()
    return ended


def run_apart(
    world_size: int,
    program: str,
    env: dict[str, str | None] | None = None,
    each: Callable[[int], dict[str, str]] = lambda rank: {},
    timeout: float = 120.0,
) -> list[subprocess.CompletedProcess]:
    """Run the text `program` in one new interpreter per rank; return exit codes and output in rank order.

    The environment is torchrun's, changed by `env` (None removes a variable) and by `each(rank)`. A rank that does not
    end within `timeout` seconds is killed, and its exit code is negative.
    """
    port = free_port()
    started = []
    for rank in range(world_size):
        variables = {**_torchrun_variables(rank, world_size, port), "PYTHONHASHSEED": str(rank + 1), **(env or {})}
        variables |= each(rank)
        environment = {**_child_environment(), **os.environ, **{k: v for k, v in variables.items() if v is not None}}
        for name in (name for name, value in variables.items() if value is None):
            environment.pop(name, None)
        command = [sys.executable, "-c", program]
        started.append(
            subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    deadline = time.monotonic() + patient(timeout)
    ended = []
    for process in started:
        try:
            out, err = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
        ended.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
    return ended


def run_benchmark(name: str, world_size: int, *arguments: str, timeout: float = 300.0) -> str:
    """Return rank 0's output of `python -m benchmarks.NAME ARGUMENTS` under torchrun on CPUs; all ranks must end well.

    In processes forked from the server: starting Python for each would take most of the time.
    """
    arguments = ("--device", "cpu", "--ranks", str(world_size), *arguments)
    ended = run_fresh(world_size, _benchmark, name, arguments, timeout=timeout)
    for end in ended:
        assert end.exitcode == 0, f"{end.exitcode}: {end.traceback}"
    return ended[0].result


def _benchmark(rank: int, world_size: int, name: str, arguments: tuple[str, ...]) -> str:
    sys.argv = [f"benchmarks.{name}", *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            code = importlib.import_module(f"benchmarks.{name}").main()
        except SystemExit as end:
            code = end.code
    assert not code, printed.getvalue()
    return printed.getvalue()


def _fresh(message: bytes, variables: dict[str, str | None], reply: Connection) -> None:
    prepare_process()
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    body, args = pickle.loads(message)
    outcome = attempt(body, *args)
    reply.send_bytes(dumps(outcome))
    os._exit(1 if isinstance(outcome, Failure) else 0)


def _torchrun_variables(rank: int, world_size: int, port: int) -> dict[str, str | None]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
