"""Ranks for tests; `checks.py` has what a test asks of an output, `outcomes.py` how results come back.

`run_ranks(world_size, body, *args)` calls `body(ctx, *args)` on every rank and returns the results in rank order.
`body` is a function of a module, for it is sent by name.

- Without torchrun the ranks are worker processes on CPUs, kept between tests. They are forked from a server that has
  torch and triton imported, so a world costs a fraction of a second. A world in which a body failed is thrown away.
- Under torchrun (`torchrun --nproc-per-node 4 -m pytest -m gpu`) every process is a rank with its GPU, and all of them
  run the same tests: `run_ranks` calls the body directly. Outcomes are exchanged after each body, so that all ranks
  go on to the next test alike. `pytestmark = both` in a module says that its tests run both ways.

Memory that a body allocates on the heap is free, and zeroed, again when the next body starts.
"""

from __future__ import annotations

import atexit
from collections import OrderedDict
from collections.abc import Callable
import contextlib
import ctypes
from dataclasses import dataclass
import faulthandler
import importlib
import io
import mmap
import multiprocessing as mp
from multiprocessing.connection import Connection, wait
import os
from pathlib import Path
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import time
from typing import Any

import iris
import pytest
import torch
import torch.distributed as dist

from tests.outcomes import Failure, attempt, dumps, raise_first

ROOT = Path(__file__).resolve().parents[1]

UNDER_TORCHRUN = "RANK" in os.environ and "WORLD_SIZE" in os.environ
ON_GPU = UNDER_TORCHRUN and torch.cuda.is_available()
# The world sizes that a test can have here: `@pytest.mark.parametrize("world_size", WORLDS)`.
WORLDS = [int(os.environ["WORLD_SIZE"])] if UNDER_TORCHRUN else [1, 2, 3, 4]
# The mark of a module whose tests run on CPU workers and, under torchrun, on GPUs.
both = [pytest.mark.gpu] if UNDER_TORCHRUN else []

TIMEOUT_S = 120.0
_WAIT_LIMIT_S = 100.0  # of a wait inside a kernel: below the above, so that its own report comes first
_GRACE_S = 5.0  # for the other ranks, once one has failed: they may wait for it in vain
_POOLS_KEPT = len(WORLDS)
_CPU_HEAP = 8 << 30  # address space; memory is taken where it is touched
_GPU_HEAP = 16 << 30


def run_ranks(world_size: int, body: Callable[..., Any], *args: Any, timeout: float = TIMEOUT_S) -> list[Any]:
    """Results of `body(ctx, *args)` in rank order; raises what a rank raised, or `TimeoutError` after `timeout` s."""
    if UNDER_TORCHRUN:
        return _run_directly(world_size, body, args)
    return _pool(world_size).run(body, args, timeout)


# --- a context that is as new for each body --------------------------------------------------------------------------


class _Renewable:
    """A context, and how to give back what a body took from its heap."""

    def __init__(self, ctx: iris.Iris) -> None:
        self.ctx = ctx
        self._used = ctx._heap.used

    def renew(self) -> None:
        """The heap as it was at first. Every rank has ended its body, and none begins the next before all are here."""
        self.ctx._ops = self.ctx._ccl = self.ctx._tracing = None
        begin, end = self._used, self.ctx._heap.used
        if end > begin:
            _zero(self.ctx._segment.local[begin:end])
        self.ctx._heap.used = begin


def _zero(memory: torch.Tensor) -> None:
    if memory.device.type == "cpu":  # whole pages go back to the system
        first = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        start = first - memory.data_ptr()
        length = (memory.numel() - start) // mmap.PAGESIZE * mmap.PAGESIZE
        if length > 0:
            remove = 9  # MADV_REMOVE
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), remove):
                raise OSError(ctypes.get_errno(), "madvise")
            memory[start + length :].zero_()
            memory = memory[:start]
    memory.zero_()


# --- CPU: worlds of worker processes ---------------------------------------------------------------------------------


def _forkserver() -> Any:
    """The multiprocessing context whose server has imported what every rank needs."""
    for name, value in _child_environment().items():
        os.environ.setdefault(name, value)
    context = mp.get_context("forkserver")
    models = ["transformers.models.llama.modeling_llama"] if "tests.layers" in sys.modules else []  # takes seconds
    context.set_forkserver_preload(["tests.harness", "iris.device", "torch.distributed", *models])
    return context


def _child_environment() -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }


def _prepare_process(stacks: str | None = None) -> None:
    """One thread, no orphans, and on SIGUSR1 a report of where the process stands."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    torch.set_num_threads(1)
    if stacks:
        faulthandler.register(signal.SIGUSR1, file=open(stacks, "w"), all_threads=False)  # noqa: SIM115


def _worker(rank: int, world_size: int, folder: str, tasks: Connection) -> None:
    _prepare_process(f"{folder}/stacks-{rank}")
    os.environ["IRIS_TIMEOUT"] = str(_WAIT_LIMIT_S)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    renewable = _Renewable(iris.iris(_CPU_HEAP))
    while True:
        try:
            body, args = pickle.loads(tasks.recv_bytes())
        except EOFError:
            os._exit(0)
        except Exception as error:  # a module that cannot be imported here
            tasks.send_bytes(dumps(Failure.of(error)))
            continue
        renewable.renew()
        dist.barrier()
        outcome = attempt(body, renewable.ctx, *args)
        try:
            message = dumps(outcome)
        except Exception as error:
            message = dumps(Failure.of(error))
        tasks.send_bytes(message)


class _Pool:
    """The worker processes of one world size."""

    def __init__(self, world_size: int) -> None:
        context = _forkserver()
        self.folder = tempfile.mkdtemp(prefix="iris-test-")
        self.processes, self.pipes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_worker, args=(rank, world_size, self.folder, theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    def run(self, body: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
        message = dumps((body, args))
        deadline = time.monotonic() + timeout
        outcomes: list[Any] = [None] * len(self.pipes)
        running = dict(zip(self.pipes, range(len(self.pipes)), strict=True))
        sound = False
        try:
            for pipe in self.pipes:
                with contextlib.suppress(BrokenPipeError):  # its end shows below
                    pipe.send_bytes(message)
            failed = False
            while running:
                ready = wait(list(running), max(0.0, deadline - time.monotonic()))
                for pipe in ready:
                    rank = running.pop(pipe)
                    try:
                        outcomes[rank] = pickle.loads(pipe.recv_bytes())
                    except (EOFError, OSError):
                        self.processes[rank].join(1)
                        code = self.processes[rank].exitcode
                        lost = RuntimeError(f"rank {rank} ended with exit code {code}")
                        outcomes[rank] = Failure(lost, str(lost))
                    if isinstance(outcomes[rank], Failure) and not failed:
                        failed = True
                        deadline = min(deadline, time.monotonic() + _GRACE_S)
                if not ready:
                    break
            if running and not failed:
                ranks = sorted(running.values())
                raise TimeoutError(f"ranks {ranks} did not end {body.__qualname__} in time\n{self._stacks(ranks)}")
            raise_first(outcomes)
            sound = True
        finally:
            if not sound:
                _discard(self)
        return outcomes

    def _stacks(self, ranks: list[int]) -> str:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError, TypeError):
                os.kill(self.processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.5)
        texts = (Path(self.folder, f"stacks-{rank}") for rank in ranks)
        return "\n".join(f"{path.name}: {path.read_text()}" for path in texts if path.exists())

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            process.join(10)
            pipe.close()
        shutil.rmtree(self.folder, ignore_errors=True)


_pools: OrderedDict[int, _Pool] = OrderedDict()


def _pool(world_size: int) -> _Pool:
    if world_size not in _pools:
        while len(_pools) >= _POOLS_KEPT:
            _pools.popitem(last=False)[1].kill()
        _pools[world_size] = _Pool(world_size)
    _pools.move_to_end(world_size)
    return _pools[world_size]


def _discard(pool: _Pool) -> None:
    for world_size, known in list(_pools.items()):
        if known is pool:
            del _pools[world_size]
    pool.kill()


@atexit.register
def close_pools() -> None:
    """Ends all workers."""
    while _pools:
        _pools.popitem()[1].kill()


# --- processes of their own, for bodies that make their context or die on purpose ------------------------------------


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
    """`body(rank, world_size, *args)` in new processes without a context; how each ended, and raises nothing.

    The environment is torchrun's for that rank, changed by `env` (None removes a variable).
    """
    context = _forkserver()
    port = _free_port()
    processes, pipes = [], []
    for rank in range(world_size):
        ours, theirs = context.Pipe(duplex=False)
        variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            **(env or {}),
        }
        message = dumps((body, (rank, world_size, *args)))
        process = context.Process(target=_fresh, args=(message, variables, theirs), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    deadline = time.monotonic() + timeout
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


def run_benchmark(name: str, world_size: int, *arguments: str, timeout: float = 300.0) -> str:
    """What rank 0 prints of `python -m benchmarks.NAME ARGUMENTS` under torchrun on CPUs; all ranks must end well.

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
    _prepare_process()
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    body, args = pickle.loads(message)
    outcome = attempt(body, *args)
    reply.send_bytes(dumps(outcome))
    os._exit(1 if isinstance(outcome, Failure) else 0)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# --- torchrun: this process is a rank --------------------------------------------------------------------------------

_session: dict[str, Any] = {}


def agreed(value: Any) -> Any:
    """Rank 0's `value` on every rank under torchrun, once all have come here; elsewhere there is one process a test."""
    if not UNDER_TORCHRUN:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=_control())
    return box[0]


def _control() -> Any:
    """The group through which the ranks of torchrun tell each other about tests."""
    if "control" not in _session:
        os.environ.setdefault("IRIS_TIMEOUT", "60")
        if not dist.is_initialized():
            if torch.cuda.is_available():
                torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            dist.init_process_group(iris.platform.backend())
        _session["control"] = dist.new_group(backend="gloo")
    return _session["control"]


def _run_directly(world_size: int, body: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
    if world_size != WORLDS[0]:
        pytest.skip(f"needs {world_size} ranks, torchrun started {WORLDS[0]}")
    _control()  # before the context, which takes the default group
    if "renewable" not in _session:
        _session["renewable"] = _Renewable(iris.iris(_GPU_HEAP if torch.cuda.is_available() else _CPU_HEAP))
    renewable, control = _session["renewable"], _control()
    renewable.renew()
    _synchronize()
    dist.barrier(control)
    outcome = attempt(body, renewable.ctx, *pickle.loads(dumps(args)))
    if not isinstance(outcome, Failure):
        outcome = attempt(_synchronized, outcome)
    outcomes: list[Any] = [None] * world_size
    dist.all_gather_object(outcomes, dumps(outcome), control)
    outcomes = [pickle.loads(text) for text in outcomes]
    if any(isinstance(outcome, Failure) for outcome in outcomes):
        # the ranks stand at different places: no barrier of this context can be right again
        spoilt = _session.pop("renewable").ctx
        with contextlib.suppress(RuntimeError):
            _synchronize()
        dist.barrier(control)  # no kernel of a peer writes here any more
        spoilt._closed = True
        spoilt._segment.close()
    raise_first(outcomes)
    return outcomes


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _synchronized(value: Any) -> Any:
    _synchronize()
    return value
