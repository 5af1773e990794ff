"""A thread that ends an engine's worker when a peer is lost.

A wait that fails inside a replayed CUDA graph leaves its record in memory that the host can read, and the results that
follow are wrong. No Python of the context runs in a replay, so this thread polls the record and ends the process;
vLLM notices a worker that has ended and ends the engine.

A peer may also be lost while this worker waits in a kernel of vLLM's, such as NCCL's, which would wait without an end.
vLLM itself notices a process that ended, but none that is stopped, so the thread looks for those, too.
"""

from __future__ import annotations

from collections.abc import Callable
import os
import threading
from typing import TYPE_CHECKING

from iris.errors import IrisError, PeerLostError
from iris.platform import timeout_s
from iris.rendezvous import is_stopped

if TYPE_CHECKING:
    from logging import Logger

    from iris.context import Iris

SECONDS = 0.2  # between two polls
EXIT_CODE = 70


def start(ctx: Iris, logger: Logger, end: Callable[[int], None] = os._exit) -> threading.Thread:
    """Start the thread for `ctx`. `end` is called with `EXIT_CODE` after the error is in the log."""
    limit_s, peers = timeout_s(), ctx.hosts.pids
    stopped_s = dict.fromkeys((rank for rank in range(len(peers)) if rank != ctx.cur_rank), 0.0)

    def check_peers() -> None:
        for rank in stopped_s:  # counted in polls: this process may have been stopped as well
            stopped_s[rank] = stopped_s[rank] + SECONDS if is_stopped(peers[rank]) else 0.0
            if stopped_s[rank] >= limit_s:
                raise PeerLostError(
                    f"the process {peers[rank]} of rank {rank} is stopped, for {limit_s:g} s (IRIS_TIMEOUT)"
                )

    def look() -> None:
        while not stop.wait(SECONDS):
            try:
                ctx.check_failure()
                check_peers()
            except IrisError as error:
                logger.critical(
                    "iris-tp: the worker of rank %d ends: %s: %s", ctx.cur_rank, type(error).__name__, error
                )
                for handler in logger.handlers:
                    handler.flush()
                end(EXIT_CODE)
                return

    stop = threading.Event()
    ctx.on_close.append(stop.set)
    thread = threading.Thread(target=look, name="iris-tp watch", daemon=True)
    thread.start()
    return thread
