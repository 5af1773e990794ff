"""Keep ranks between tests; `processes.py` has those of one test, `checks.py` the checks of outputs.

`run_ranks(world_size, body, *args)` calls `body(ctx, *args)` on every rank and returns the results in rank order.
`body` is a function of a module, for it is sent by name.

- Without torchrun the ranks are worker processes on CPUs, kept between tests. They are forked from a server that has
  torch and triton imported, so a world costs a fraction of a second. A world in which a body failed is thrown away.
- Under torchrun (`torchrun --nproc-per-node 4 -m pytest -m gpu`) every process is a rank with its GPU, and all of them
  run the same tests: `run_ranks` calls the body directly. Outcomes are exchanged after each body, so that all ranks
  go on to the next test alike. `pytestmark = both` in a module makes its tests run both ways.

Memory that a body allocates on the heap is free, and zeroed, again when the next body starts.
"""

from __future__ import annotations

import atexit
from collections import OrderedDict
from collections.abc import Callable
import contextlib
import ctypes
import gc
import mmap
from multiprocessing.connection import Connection, wait
import os
from pathlib import Path
import pickle
import shutil
import signal
import tempfile
import time
from typing import Any

import iris
import pytest
import torch
import torch.distributed as dist

from tests.outcomes import Failure, attempt, dumps, raise_first
from tests.processes import forkserver, patient, prepare_process

UNDER_TORCHRUN = "RANK" in os.environ and "WORLD_SIZE" in os.environ
ON_GPU = UNDER_TORCHRUN and torch.cuda.is_available()
if ON_GPU:  # before any test, for torch captures graphs of all in a stream of the device that is the first one's
    torch.cuda.set_device(iris.platform.device(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])))
# The world sizes that a test can have here: `@pytest.mark.parametrize("world_size", WORLDS)`.
WORLDS = [int(os.environ["WORLD_SIZE"])] if UNDER_TORCHRUN else [1, 2, 3, 4]
# The mark of a module whose tests run on CPU workers and, under torchrun, on GPUs.
both = [pytest.mark.gpu] if UNDER_TORCHRUN else []

TIMEOUT_S = float(os.environ.get("IRIS_TEST_TIMEOUT", 120.0))
_WAIT_LIMIT_S = TIMEOUT_S / 1.2  # of a wait inside a kernel: below the above, so that its own report comes first
_GRACE_S = 5.0  # for the other ranks, once one has failed: they may wait for it in vain
_ENDS_S = 1.0  # for workers that wait for a body, to end themselves
_MOST_POOLS = len(WORLDS)
_CPU_HEAP = 8 << 30  # address space; memory is taken where it is touched
_GPU_HEAP = int(os.environ.get("IRIS_TEST_HEAP", 16 << 30))


def run_ranks(world_size: int, body: Callable[..., Any], *args: Any, timeout: float = TIMEOUT_S) -> list[Any]:
    """Return results of `body(ctx, *args)` in rank order; raise a rank's error, or `TimeoutError` after `timeout` s."""
    if UNDER_TORCHRUN:
        return _run_directly(world_size, body, args)
    return _pool(world_size).run(body, args, timeout)


# --- a context that is as new for each body --------------------------------------------------------------------------


class _Renewable:
    """A context, and how to give back what a body took from its heap."""

    def __init__(self, ctx: iris.Iris) -> None:
        self.ctx = ctx
        self._used = ctx.heap.used
        if ctx.device.type == "cuda":
            gc.freeze()  # what is imported, so that each collection is short

    def renew(self) -> None:
        """Restore the heap. Every rank has ended its body, and none begins the next before all are here."""
        if self.ctx.device.type == "cuda":
            # torch's allocator must free a tensor on the heap, which an exception's traceback may have kept, before it
            # is given the same address again; otherwise it aborts when the tensor dies
            gc.collect()
        self.ctx._components.clear()
        self.ctx.on_change.clear()
        self.ctx.recording, self.ctx.invariant = False, None
        for begin, end in self.ctx.heap.cut(self._used):
            _zero(self.ctx._segment.local[begin:end])


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


def _worker(rank: int, world_size: int, folder: str, tasks: Connection) -> None:
    prepare_process(f"{folder}/stacks-{rank}")
    os.environ["IRIS_TIMEOUT"] = str(patient(_WAIT_LIMIT_S))
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
        context = forkserver()
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
        deadline = time.monotonic() + patient(timeout)
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

    def end(self) -> None:
        """Let workers that wait for a body end themselves, so that what watches them can write; kill the others."""
        for pipe in self.pipes:
            pipe.close()
        deadline = time.monotonic() + _ENDS_S
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
        for process in self.processes:
            process.join(10)
        shutil.rmtree(self.folder, ignore_errors=True)


_pools: OrderedDict[int, _Pool] = OrderedDict()


def _pool(world_size: int) -> _Pool:
    if world_size not in _pools:
        while len(_pools) >= _MOST_POOLS:
            _pools.popitem(last=False)[1].end()
        _pools[world_size] = _Pool(world_size)
    _pools.move_to_end(world_size)
    return _pools[world_size]


def _discard(pool: _Pool) -> None:
    for world_size, known in list(_pools.items()):
        if known is pool:
            del _pools[world_size]
    pool.end()


@atexit.register
def close_pools() -> None:
    """End all workers."""
    while _pools:
        _pools.popitem()[1].end()


# --- torchrun: this process is a rank --------------------------------------------------------------------------------

_session: dict[str, Any] = {}


def agreed(value: Any) -> Any:
    """Return rank 0's `value` on every rank under torchrun, once all are here; elsewhere a test has one process."""
    if not UNDER_TORCHRUN:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=_control())
    return box[0]


def once(work: Callable[[], Any]) -> Any:
    """Return `work()`, which under torchrun rank 0 calls while the others wait: to write what all ranks read."""
    first = not UNDER_TORCHRUN or os.environ["RANK"] == "0"
    return agreed(work() if first else None)


def _control() -> Any:
    """Return the group through which the ranks of torchrun agree on tests."""
    if "control" not in _session:
        os.environ.setdefault("IRIS_TIMEOUT", "60")
        if not dist.is_initialized():
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
    outcome = attempt(body, renewable.ctx, *pickle.loads(agreed(dumps(args))))  # what rank 0 drew, as workers have it
    if not isinstance(outcome, Failure):
        outcome = attempt(_synchronized, outcome)
    elif isinstance(lost := attempt(renewable.ctx.check_failure), Failure):
        outcome = lost  # the cause of a wrong result
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
