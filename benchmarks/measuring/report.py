"""The record of a run: command, machine, versions, and figures as JSON.

`python -m benchmarks.report` writes the tables of README and docs from these files.
"""

import argparse
from collections.abc import Callable, Iterable
import datetime
import importlib.metadata
import json
import math
from pathlib import Path
import platform
import re
import subprocess
import sys

from iris_tp.bench.team import Team
import torch

from benchmarks.measuring import freshness

RESULTS = Path(__file__).parents[1] / "results"


def add_arguments(parser: argparse.ArgumentParser, dtype: str | None = None) -> None:
    """Add the arguments of every benchmark: ranks, device, memory, output folder. `dtype`: the only one, if given."""
    parser.add_argument("--ranks", type=at_least(1), help="default: all GPUs, or two CPU ranks")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=device, choices=("cuda", "cpu"), default=default)
    if dtype:
        parser.set_defaults(dtype=dtype)
    else:
        parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--heap-gib", type=at_least(0.001), help="symmetric heap of a rank; default 8, on CPUs 0.25")
    parser.add_argument("--time-limit", type=at_least(0.01), default=400, help="seconds after which nothing new starts")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file")
    parser.add_argument("--name", help="of the JSON file; default: benchmark, dtype unless bf16, GPU, ranks")


def device(text: str) -> str:
    """Return the value of --device. Raises for a GPU where torch finds none."""
    if text == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("cuda; expected cpu, for torch finds no GPU")
    return text


def at_least(least: float, most: float | None = None) -> Callable[[str], float]:
    """Return the type of an argument: a number from `least` up to `most` if given, an integer where `least` is one."""

    def number(text: str) -> float:
        value = type(least)(text)
        if not least <= value < math.inf or most is not None and value > most:
            raise ValueError
        return value

    # argparse: "invalid number from 1 on value: '0'"
    number.__name__ = f"number from {least} on" if most is None else f"number from {least} to {most}"
    return number


def numbers(text: str) -> list[int]:
    """Return the value of an argument such as 1,16,64."""
    return [at_least(1)(each) for each in text.split(",")]


numbers.__name__ = "list of numbers from 1 on"


def sizes(text: str) -> list[tuple[int, int, int]]:
    """Return the value of an argument such as 8192,8192,7168;512,8192,2048: M, N and K of each row."""
    return [(M, N, K) for M, N, K in map(numbers, text.split(";"))]


sizes.__name__ = "list of sizes M,N,K;M,N,K from 1 on"


def some_of(names: Iterable[str]) -> Callable[[str], list[str]]:
    """Return the type of an argument that names some of `names`, separated by commas."""
    known = list(names)

    def chosen(text: str) -> list[str]:
        if unknown := [each for each in text.split(",") if each not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}; expected some of {', '.join(known)}")
        return text.split(",")

    return chosen


def settle(args: argparse.Namespace, argv: list[str] | None, benchmark: str, module: str = "") -> None:
    """Fill in the defaults that depend on the device. `module`: that of the command, if it has another name."""
    gpu = args.device == "cuda"
    if args.ranks is None:
        args.ranks = torch.cuda.device_count() if gpu else 2
    args.heap_gib = args.heap_gib or (8 if gpu else 0.25)
    args.benchmark = benchmark
    args.command = command(module or benchmark, sys.argv[1:] if argv is None else argv)


def modes(parser: argparse.ArgumentParser, args: argparse.Namespace) -> list[str]:
    """Return those of `args.modes` that the device has."""
    available = [mode for mode in args.modes if args.device == "cuda" or mode == "eager"]
    if not available:
        parser.error(f"--modes {','.join(args.modes)}: expected eager, for CPUs have no CUDA graphs")
    return available


def command(module: str, argv: list[str]) -> str:
    """Return the command line without this machine's output folder."""
    line = " ".join(f"'{word}'" if re.search(r"[\s;]", word) else word for word in argv)
    return re.sub(r" ?--out[ =]\S+", "", f"python -m benchmarks.{module} {line}").strip()


def describe_run(team: Team, args: argparse.Namespace) -> dict:
    gpu = torch.cuda.get_device_name() if team.cuda else "CPU"
    versions = {"torch": torch.__version__, "triton": importlib.metadata.version("triton")}
    if team.cuda:
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        versions["CUDA"] = torch.version.cuda
        versions["driver"] = driver_version()
    versions["Python"] = platform.python_version()
    return {
        "benchmark": args.benchmark,
        "command": args.command,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "gpu": gpu,
        "world": team.world,
        "dtype": args.dtype,
        "versions": versions,
        "commit": freshness.commit(),
    }


def driver_version() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def omissions(report: dict) -> list[str]:
    """Return a line with the cases that the run omitted for want of time or memory, or no line."""
    return [f"Left out for want of time or memory: {'; '.join(report['left_out'])}."] if report.get("left_out") else []


def headline(report: dict) -> str:
    """Return GPU, dtype, date, versions and, where recorded, the commit."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items() if version)
    commit = f", commit {report['commit']}" if report.get("commit") else ""
    return f"{report['world']} x {report['gpu']}, {report['dtype']}, {report['date']}{commit}; {versions}."


def slug(gpu: str) -> str:
    """Return a GPU's name as part of a file's."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower().removeprefix("nvidia")).strip("-")


def drop(result: dict, status: str, reason: str) -> None:
    """Record why a contender failed or is wrong, and remove the figures that it had."""
    for name in [name for name in result if name.endswith(("_us", "_ms", "_per_s"))]:
        del result[name]
    result["status"] = status
    result["notes"].append(reason)


def summary(result: dict) -> str:
    """Return a contender's times in graphs and eager for the progress line, or its failure."""
    if result["status"] != "ok":
        return f"{result['status']} ({result['notes'][-1]})"
    return " / ".join(f"{result[key]:.1f}" if key in result else "-" for key in ("graph_us", "eager_us"))


def time_of(result: dict) -> float | None:
    """Return the time in a CUDA graph, else eager."""
    return result.get("graph_us") or result.get("eager_us")


def write(report: dict, args: argparse.Namespace) -> None:
    """Write the JSON file of a run so far, with the digests of its code."""
    report["code"] = freshness.recorded(report)
    path(report, args).write_text(json.dumps(rounded(report), indent=1, allow_nan=False) + "\n")


def path(report: dict, args: argparse.Namespace, suffix: str = ".json") -> Path:
    """Return the path of a run's file: --name, or benchmark, dtype (float16, float32 only), GPU and ranks."""
    args.out.mkdir(parents=True, exist_ok=True)
    dtype = f"_{report['dtype']}" if report["dtype"] in ("float16", "float32") else ""
    name = args.name or f"{report['benchmark']}{dtype}_{slug(report['gpu'])}_x{report['world']}"
    return args.out / (name + suffix)


def rounded(value):
    """Round figures to three decimals, below 1 to three digits; return others than finite ones as text for JSON."""
    if isinstance(value, float):
        if abs(value) < 1:
            return float(f"{value:.3g}")
        return round(value, 3) if abs(value) < float("inf") else str(value)
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value
