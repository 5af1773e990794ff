"""Lose a rank of a vLLM engine under load: `python -m tests.vllm.lose_rank`, on two GPUs or more, with vLLM installed.

Two engines of a short Llama generate, on GPUs of their own where there are four. One's rank 1 is killed, the other's is
stopped. Each engine must end within IRIS_TIMEOUT and what vLLM takes to shut down, and the log of the one whose rank
stopped must have the plug-in's error, which names rank 1. Prints one line of JSON, and ends with 1 if that is not so.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
import re
import signal
import subprocess
import sys
import tempfile
import time

import torch

RANKS, LAYERS = 2, 4
TIMEOUT_S = 15  # IRIS_TIMEOUT
SHUTDOWN_S = 20
START_S = 240
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
ERROR = r"iris-tp: the worker of rank \d+ ends: \w+: .*"


def generate(folder: str, ready: str) -> None:
    """Generate without an end; the work of an engine's process."""
    from benchmarks.cases.vllm_plugin import Engine, drawn

    request = {"folder": folder, "ranks": RANKS, "batches": [16], "prompts": [[1, 128]]}
    request |= {"memory": 0.4, "cache": 1 << 30}  # for vLLM cannot measure what is free while another engine starts
    engine, prompts = Engine(request), drawn([64] * 16, seed=1)
    engine.seconds(prompts, 129)
    Path(ready).touch()
    while True:
        engine.seconds(prompts, 129)


class Loaded:
    """An engine that generates, in a process of its own with its own caches and log."""

    def __init__(self, folder: Path, model: Path, lane: int, port: int) -> None:
        from benchmarks.vllm import own_settings

        folder.mkdir()
        self.ready, self.log = folder / "ready", folder / "log"
        gpus = range(lane * RANKS, (lane + 1) * RANKS)
        environment = {**os.environ, **own_settings(folder, gpus, port), "IRIS_TIMEOUT": str(TIMEOUT_S)}
        line = [sys.executable, "-m", "tests.vllm.lose_rank", "generate", str(model), str(self.ready)]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(line, env=environment, stdout=log, stderr=log, start_new_session=True)

    def wait_until_ready(self, end: float) -> None:
        while not self.ready.exists():
            if self.process.poll() is not None or time.time() > end:
                raise RuntimeError(f"no engine: {self.process.poll()}\n{self.log.read_text()[-4000:]}")
            time.sleep(0.1)

    def lose(self, sign: int) -> dict:
        """Send `sign` to the worker of rank 1, and return what becomes of the engine."""
        worker = worker_of(self.process.pid, 1)
        began = time.time()
        os.kill(worker, sign)
        try:
            self.process.wait(TIMEOUT_S + SHUTDOWN_S)
        except subprocess.TimeoutExpired:
            pass
        code, taken = self.process.returncode, time.time() - began
        text = self.log.read_text()
        errors = re.findall(ERROR, text)
        of_vllm = [line for line in text.splitlines() if "died unexpectedly" in line or "EngineDead" in line]
        return {
            "ended": code is not None,
            "code": code,
            "seconds": round(taken, 1),
            "errors": errors[:2],
            "vllm": [line[-160:] for line in of_vllm[:2]],
        }

    def end(self) -> None:
        for pid in [*descendants(self.process.pid), self.process.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait()


def descendants(pid: int) -> list[int]:
    """Return the processes below `pid`."""
    own = [
        int(each) for children in Path(f"/proc/{pid}/task").glob("*/children") for each in children.read_text().split()
    ]
    return [*own, *(below for each in own for below in descendants(each))]


def worker_of(pid: int, rank: int) -> int:
    """Return the worker of `rank` below the engine's process `pid`, found by the title that vLLM gives it."""
    titles = {each: Path(f"/proc/{each}/cmdline").read_bytes().decode(errors="replace") for each in descendants(pid)}
    (pid,) = [each for each, title in titles.items() if f"Worker_TP{rank}" in title]
    return pid


def main() -> None:
    from benchmarks.cases.vllm_engine import SETTINGS
    from benchmarks.cases.whole_models import config_for_others

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and end the engines
    os.environ.update({**SETTINGS, "VLLM_LOGGING_LEVEL": "INFO"})
    lanes = range(2) if torch.cuda.device_count() >= 2 * RANKS else (0, 0)
    with tempfile.TemporaryDirectory(prefix="vllm-lose-") as name:
        folder, end = Path(name), time.time() + START_S
        config_for_others("llama-3-8b", LAYERS).save_pretrained(folder / "model")
        places = zip(SIGNALS, lanes, (22000, 23000), strict=True)
        engines = [Loaded(folder / kind, folder / "model", lane, port) for kind, lane, port in places]
        try:
            for engine in engines:
                engine.wait_until_ready(end)
            result = {kind: engine.lose(SIGNALS[kind]) for kind, engine in zip(SIGNALS, engines, strict=True)}
        finally:
            for engine in engines:
                engine.end()
    print(json.dumps(result))
    sys.exit(not all(each["ended"] for each in result.values()) or not result["stopped"]["errors"])


if __name__ == "__main__":
    generate(*sys.argv[2:]) if sys.argv[1:2] == ["generate"] else main()
