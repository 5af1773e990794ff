"""Measure vLLM with and without the plug-in: `python -m benchmarks.vllm --models llama-3-8b --ranks 2`.

Two engines of each model start from empty caches, one with stock vLLM and one with the plug-in, and are timed: the
start, decode steps after prompts of 128 tokens, and first tokens of `--prompts`, each batch x length. Weights are
random and the same in both. The greedy tokens of 64 prompts are compared: where they differ first, the two largest
logits must be within the rounding of bfloat16.

The engines run one after the other, or with `--beside` both at once, each on GPUs of its own. With `--together` all
models' engines start at once on the same GPUs, and measure one after the other when all are ready. Prints a table and
writes `vllm_plugin_<model>_<gpu>_x<ranks>.json` for each model. vLLM must be installed; its logs go to `--logs`.
"""

import argparse
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
import datetime
import importlib.metadata
import json
import os
from pathlib import Path
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time

import torch

from benchmarks.cases import whole_models
from benchmarks.cases.vllm_engine import SETTINGS, cache_bytes
from benchmarks.cases.vllm_plugin import PROMPT
from benchmarks.measuring import freshness, report
from benchmarks.tables import vllm_table

SIDES = ("stock", "plugin")
ROUNDING = 2.0**-7  # of a logit, relative: a unit in the last place of bfloat16
_PORTS = 21000, 500  # the first engine's, and between engines
_running: list[subprocess.Popen] = []


class Turns:
    """Lets engines on the same GPUs measure one after the other, once all of them are ready or have ended.

    The others are stopped meanwhile, since a host that waits for work polls, which takes time from one that launches.
    """

    def __init__(self, engines: int, end: float) -> None:
        self._started, self._end = threading.Barrier(engines), end
        self._over = [threading.Event() for _ in range(engines)]

    @contextmanager
    def of(self, engine: subprocess.Popen, number: int) -> Iterator[None]:
        """Wait for the turn of `engine`, the one of this `number`."""
        try:
            self._started.wait(self._left())
            _signal(engine, signal.SIGSTOP)
            for earlier in self._over[:number]:
                earlier.wait(self._left())
            _signal(engine, signal.SIGCONT)
            yield
        finally:
            self._over[number].set()

    def _left(self) -> float:
        return max(1.0, self._end - time.time())


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=lambda text: text.split(","), default=["llama-3-8b"], help="shapes, by commas")
    parser.add_argument("--ranks", type=report.at_least(2), default=2, help="tensor-parallel size (default 2)")
    parser.add_argument("--layers", type=report.at_least(1), help="shorten the models to this number of layers")
    parser.add_argument("--batches", type=report.numbers, default="1,16,64", help="of steps; default: %(default)s")
    parser.add_argument("--prompts", type=_prompts, default="1x128,16x128,1x2048", help="default: %(default)s")
    parser.add_argument("--rounds", type=report.at_least(1), default=3, help="of each figure; default: %(default)s")
    parser.add_argument("--first", choices=SIDES, default="stock", help="which engine starts first, or on GPU 0 on")
    at_once = parser.add_mutually_exclusive_group()
    at_once.add_argument("--beside", action="store_true", help="both engines at once, on twice as many GPUs")
    at_once.add_argument("--together", action="store_true", help="start all engines at once, on the same GPUs")
    parser.add_argument("--engine-limit", type=float, default=400, help="seconds after which an engine starts no row")
    parser.add_argument("--time-limit", type=float, default=1800, help="seconds after which engines are ended")
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder of the JSON files")
    parser.add_argument("--logs", type=Path, help="folder of vLLM's logs; default: a temporary one")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.models if name not in whole_models.SHAPES]:
        parser.error(f"--models {','.join(unknown)}: expected some of {', '.join(whole_models.SHAPES)}")
    line = report.command("vllm", sys.argv[1:] if argv is None else argv)
    args.command = re.sub(r" ?--logs[ =]\S+", "", line)  # a folder of this machine
    args.logs = args.logs or Path(tempfile.mkdtemp(prefix="vllm-logs-"))
    return args


def _prompts(text: str) -> list[tuple[int, int]]:
    pairs = [tuple(report.numbers(each.replace("x", ","))) for each in text.split(",")]
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError
    return pairs  # type: ignore[return-value]


_prompts.__name__ = "list of batch x length such as 1x128,16x128"


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    # before the threads: transformers imports its classes when they are first used
    args.configs = {model: whole_models.config_for_others(model, args.layers) for model in args.models}
    end = time.time() + args.time_limit
    sides = SIDES if args.first == SIDES[0] else SIDES[::-1]
    lanes = [[(model, side) for model in args.models for side in sides]]
    if args.beside:
        lanes = [[(model, side) for model in args.models] for side in sides]
    elif args.together:
        lanes = [[engine] for engine in lanes[0]]
    turns = Turns(len(lanes), end) if args.together else None
    results: dict[tuple[str, str], dict] = {}

    def work(lane: int) -> None:
        for model, side in lanes[lane]:
            results[model, side] = run_engine(args, model, side, lane, end, turns)
            print(_line(model, side, results[model, side]), flush=True)
            if all((model, each) in results for each in SIDES):
                finish(args, model, {each: results[model, each] for each in SIDES})

    signal.signal(signal.SIGTERM, _end_all)
    with ThreadPoolExecutor(len(lanes)) as pool:
        list(pool.map(work, range(len(lanes))))


def run_engine(
    args: argparse.Namespace, model: str, side: str, lane: int, end: float, turns: Turns | None = None
) -> dict:
    """Start an engine on the GPUs of `lane`, or on the first if it has a turn, wait for it and return its figures.

    Without any, returns {"failed": reason}.
    """
    args.logs.mkdir(parents=True, exist_ok=True)
    log, began = args.logs / f"{model}_{side}.log", time.time()
    with tempfile.TemporaryDirectory(prefix=f"vllm-{side}-") as name:
        folder = Path(name)
        args.configs[model].save_pretrained(folder / "model")
        request = {"folder": str(folder / "model"), "out": str(folder / "out.json"), "began": began}
        request |= {key: getattr(args, key) for key in ("ranks", "batches", "prompts", "rounds")}
        request |= {"limit_s": min(args.engine_limit, end - began)}
        request |= {"ready": str(folder / "ready"), "go": str(folder / "go")}
        if turns:  # vLLM cannot measure what is free while another engine starts
            rows = [*((batch, PROMPT) for batch in args.batches), *args.prompts]
            request |= {"memory": 0.2, "cache": cache_bytes(rows, args.configs[model], args.ranks)}
        first_gpu = 0 if turns else lane * args.ranks
        own = own_settings(folder, range(first_gpu, first_gpu + args.ranks), _PORTS[0] + lane * _PORTS[1])
        environment = {**os.environ, **SETTINGS, "VLLM_LOGGING_LEVEL": "INFO", **own}
        environment["IRIS_TP_VLLM"] = str(int(side == "plugin"))
        line = [sys.executable, "-m", "benchmarks.cases.vllm_plugin", json.dumps(request)]
        with log.open("w") as file:
            child = subprocess.Popen(line, env=environment, stdout=file, stderr=file, start_new_session=True)
            _running.append(child)
            try:
                _wait(child, end, folder / "ready")
                with turns.of(child, lane) if turns else nullcontext():
                    (folder / "go").touch()
                    _wait(child, end)
            finally:
                _end(child)
                _running.remove(child)
        out = folder / "out.json"
        figures = json.loads(out.read_text()) if out.exists() else {"failed": _reason(log, child.returncode)}
    return {**figures, "took_s": round(time.time() - began, 1)}


def _wait(child: subprocess.Popen, end: float, ready: Path | None = None) -> None:
    """Wait until `child` ends or the file `ready` exists, at most until `end`."""
    while child.poll() is None and time.time() < end and not (ready and ready.exists()):
        time.sleep(0.05)


def own_settings(folder: Path, gpus: Sequence[int], port: int) -> dict[str, str]:
    """Return the settings that keep an engine apart from others: GPUs, ports, and caches that begin empty."""
    paths = {"VLLM_CACHE_ROOT": "vllm", "TRITON_HOME": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)),
        "VLLM_PORT": str(port),
        "VLLM_HOST_IP": "127.0.0.1",
        **{name: str(folder / path) for name, path in paths.items()},
    }


def _end_all(*_: object) -> None:
    for child in list(_running):
        _end(child)
    os._exit(1)


def _end(child: subprocess.Popen) -> None:
    _signal(child, signal.SIGKILL)  # its ranks, too, which would keep the GPUs' memory
    child.wait()


def _signal(child: subprocess.Popen, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, number)


def _reason(log: Path, code: int | None) -> str:
    lines = [line for line in log.read_text().splitlines() if "Error" in line]
    return lines[-1][-300:] if lines else f"ended by {code} without a figure, see {log}"


def _line(model: str, side: str, figures: dict) -> str:
    if "failed" in figures:
        return f"{model}, {side}: {figures['failed']}"
    steps = ", ".join(f"{batch}: {each['step']:.3f}" for batch, each in figures["step_ms"].items())
    first = ", ".join(f"{size}: {each['queue']:.2f}" for size, each in figures["first_token_ms"].items())
    return f"{model}, {side}: ready {figures['startup_s']} s, all {figures['took_s']} s; step {steps}; first {first} ms"


def compared(stock: list[dict], plugin: list[dict]) -> dict:
    """Return how many prompts have equal tokens, and how many of the others differ first within the rounding of logits.

    Each prompt is {"tokens": ids, "logits": the two largest of each token}. `gaps` are those of the other prompts, at
    the first token that differs, relative to the largest logit; the smaller one of both engines counts.
    """
    gaps = []
    for one, other in zip(stock, plugin, strict=True):
        pairs = zip(one["tokens"], other["tokens"], strict=True)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if first is not None:
            gaps.append(min(_gap(side["logits"][first]) for side in (one, other)))
    within = sum(gap <= ROUNDING for gap in gaps)
    return {
        "prompts": len(stock),
        "tokens_each": len(stock[0]["tokens"]),
        "equal_sequences": len(stock) - len(gaps),
        "within_rounding": within,
        "gaps": gaps,
    }


def _gap(logits: list[float]) -> float:
    best, second = logits
    return (best - second) / max(abs(best), 1e-30)


def finish(args: argparse.Namespace, model: str, sides: dict[str, dict]) -> None:
    """Write the file of one model, and print its table."""
    if any("failed" in each for each in sides.values()):
        return
    measured = {
        "benchmark": "vllm_plugin",
        "model": model,
        "command": args.command,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "gpu": sides["stock"]["gpu"],
        "gpus": args.ranks,
        "versions": {
            "vllm": sides["stock"]["version"],
            "torch": torch.__version__,
            "triton": importlib.metadata.version("triton"),
        },
        "commit": freshness.commit(),
        "beside": args.beside,
        "together": args.together,
        "rounds": args.rounds,
        **({"layers": args.layers} if args.layers else {}),
        "startup_s": {side: each["startup_s"] for side, each in sides.items()},
        "config": {side: each["config"] for side, each in sides.items()},
        **{key: {side: each[key] for side, each in sides.items()} for key in ("step_ms", "first_token_ms")},
    }
    if all("greedy" in each for each in sides.values()):
        measured["greedy_tokens"] = compared(sides["stock"]["greedy"], sides["plugin"]["greedy"])
    shape = model + (f"-{args.layers}layers" if args.layers else "")
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"vllm_plugin_{shape}_{report.slug(measured['gpu'])}_x{args.ranks}.json"
    path.write_text(json.dumps(report.rounded(measured), indent=1, allow_nan=False) + "\n")
    print(vllm_table.table(measured, path.name), flush=True)


if __name__ == "__main__":
    main()
