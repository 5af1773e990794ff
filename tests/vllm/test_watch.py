"""The thread that ends a worker of vLLM when a peer is lost, without vLLM: peers are real processes."""

from __future__ import annotations

from collections.abc import Iterator
import logging
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

from iris.errors import PeerLostError
from layers.vllm import watch
import pytest

TIMEOUT_S = 1.0


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen]:
    monkeypatch.setenv("IRIS_TIMEOUT", str(TIMEOUT_S))
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


class Ended:
    """A context of rank 0 that is watched, and what the thread does."""

    def __init__(self, peer: subprocess.Popen) -> None:
        self.failure: PeerLostError | None = None
        self.codes: list[int] = []
        self.done, self.on_close, self.messages = threading.Event(), [], []
        logger = logging.Logger("watched")
        handler = logging.StreamHandler(SimpleNamespace(write=self.messages.append, flush=lambda: None))
        logger.addHandler(handler)
        ctx: Any = SimpleNamespace(
            hosts=SimpleNamespace(pids=[1, peer.pid]), cur_rank=0, check_failure=self.check, on_close=self.on_close
        )
        watch.start(ctx, logger, self.end)

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def end(self, code: int) -> None:
        self.codes.append(code)
        self.done.set()


def test_a_peer_that_stays_stopped_ends_the_worker(peer: subprocess.Popen) -> None:
    ended = Ended(peer)
    peer.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    assert ended.done.wait(20 * TIMEOUT_S)
    assert time.monotonic() - began >= 0.9 * TIMEOUT_S
    assert ended.codes == [watch.EXIT_CODE]
    assert f"the process {peer.pid} of rank 1 is stopped, for 1 s (IRIS_TIMEOUT)" in "".join(ended.messages)


def test_a_peer_that_goes_on_in_time_is_not_lost(peer: subprocess.Popen) -> None:
    ended = Ended(peer)
    for _ in range(4):  # together longer than the limit
        peer.send_signal(signal.SIGSTOP)
        time.sleep(0.4 * TIMEOUT_S)
        peer.send_signal(signal.SIGCONT)
        time.sleep(3 * watch.SECONDS)
    assert not ended.codes
    (stop,) = ended.on_close
    stop()


def test_a_failed_wait_ends_the_worker(peer: subprocess.Popen) -> None:
    ended = Ended(peer)
    ended.failure = PeerLostError("rank 0 lost rank 1")
    assert ended.done.wait(20 * TIMEOUT_S)
    assert ended.codes == [watch.EXIT_CODE] and "rank 0 lost rank 1" in "".join(ended.messages)
