"""The command lines of `iris-tp`: one parser a command, none of which imports torch.

So `--help` and a wrong argument take milliseconds, and work where torch is not installed. Types such as `count` refuse
a value as argparse does: one line that names the argument, the value and what is expected, and exit code 2.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
import math
from pathlib import Path
import re
from typing import Any

from .bench.rows import CALLS
from .torchrun import report_failure

PROMPT = "Name the first six months of the year."
"""The demo's. Each token of the answer leads the next best by 0.7 or more in logits, beyond bfloat16's rounding."""
MOST_RANKS = 16
"""Ranks of a context share one host, and no host has more GPUs."""
LENGTH, STEPS = 12, 3
"""Tokens that `verify` reads and generates by default."""
DTYPES = ("float32", "bfloat16", "float16")
WEIGHTS = ("widened", "fp8", "fp8_all", "fp8_block", "int4", "mxfp4")
_WEIGHTS_HELP = "round linear weights, or widen those of a quantized checkpoint (docs/guides/quantised.md)"
_OPS = "ops regret routers norms ccl rooted tiles moe all_scatter rma"
_MODELS_AND_CHECKS = "llm step fp8 quantised invariance stress litmus"
IN_CHECKOUT = (*_OPS.split(), *_MODELS_AND_CHECKS.split())
"""Benchmarks that only a checkout has."""
GPUS = {
    "a100": ("NVIDIA A100-SXM4-80GB", 108),
    "h20": ("NVIDIA H20", 78),
    "h100": ("NVIDIA H100", 132),
    "h200": ("NVIDIA H200", 132),
    "h800": ("NVIDIA H800", 132),
    "b200": ("NVIDIA B200", 148),
    "mi300x": ("AMD Instinct MI300X", 304),
    "mi325x": ("AMD Instinct MI325X", 304),
    "mi350x": ("AMD Instinct MI350X", 256),
    "mi355x": ("AMD Instinct MI355X", 256),
    "interpreter": ("interpreter", 1),
}
"""The choices of `plan --gpu`: the name of the device and its number of multiprocessors."""


def count(text: str, most: int | None = None) -> int:
    """Return the integer from 1 to `most` that `text` spells."""
    if not text.isdecimal() or not 1 <= int(text) <= (most or math.inf):
        raise argparse.ArgumentTypeError(
            f"is {_shown(text)}; expected an integer from 1" + (f" to {most}" if most else "")
        )
    return int(text)


def _shown(text: str) -> str:
    return text if text.lstrip("-").isdecimal() else repr(text)


def counts(text: str) -> tuple[int, ...]:
    """Return the integers from 1 that `text` lists, as 2,7,64."""
    return tuple(map(count, text.split(",")))


def _number(text: str, least: float = 0.0, most: float = math.inf, above: bool = True) -> float:
    """Return the number from `least` to `most` that `text` spells; with `above`, without `least` itself."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or not least <= value <= most or (above and value == least):
        bounds = f"above {least:g}" if above else f"from {least:g}"
        raise argparse.ArgumentTypeError(
            f"is {_shown(text)}; expected a number {bounds}" + (f", at most {most:g}" if most < math.inf else "")
        )
    return value


ranks: Callable[[str], int] = partial(count, most=MOST_RANKS)


def _ranks_list(text: str) -> tuple[int, ...]:
    return tuple(map(ranks, text.split(",")))


class _Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are one line that starts with the command, and points to its help."""

    def error(self, message: str) -> Any:
        message = re.sub(r"^argument (\S+): (is )?", lambda match: f"{match[1]}{' is ' if match[2] else ': '}", message)
        report_failure(f"{self.prog}: {message}; see {self.prog} --help")
        raise SystemExit(2)


def main(version: str) -> argparse.ArgumentParser:
    """Return the parser of `iris-tp` itself, which leaves the arguments of a command to the command's parser."""
    parser = _Parser("iris-tp", description="Tensor-parallel layers over fused ops.")
    parser.add_argument("--version", action="version", version=f"iris-tp {version}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in _COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    return parser


_COMMANDS = {
    "generate": "generate text with a checkpoint, split over ranks",
    "demo": "split a small language model and compare its text with the unsplit model's",
    "plan": "explain which kernel a call would take; needs no GPU",
    "calibrate": "measure this machine's rates, which plans use",
    "bench": "time an op, and torch's product and collective, on this machine",
    "verify": "check that a row has the same bits in any batch, or on any number of ranks",
    "doctor": "list what this machine lacks, and how to get it",
}


def generate() -> argparse.ArgumentParser:
    parser = _Parser("iris-tp generate", description="Generate text with a Hugging Face checkpoint, split over ranks.")
    parser.add_argument("model", metavar="MODEL", help="a folder, a name on the Hugging Face hub, or smollm2")
    parser.add_argument("prompt", metavar="PROMPT", help="the text to continue; - reads it from standard input")
    parser.add_argument("--chat", action="store_true", help="send PROMPT as a user's message, by the chat template")
    parser.add_argument("--ranks", type=ranks, help="default: one a GPU, four at most; 2 on CPUs")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: GPUs, if there are any")
    parser.add_argument(
        "--tokens", type=count, default=128, help="the largest number of new tokens (default %(default)s)"
    )
    temperature = partial(_number, above=False)
    parser.add_argument(
        "--temperature", type=temperature, default=0.0, help="0, the default, takes the most likely token"
    )
    parser.add_argument(
        "--top-p",
        type=partial(_number, most=1.0),
        default=1.0,
        help="sample from the most likely tokens with this share of the probability (default 1)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the samples (default %(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, help="default: the checkpoint's on GPUs, float32 on CPUs")
    parser.add_argument("--weights", choices=WEIGHTS, help=_WEIGHTS_HELP)
    parser.add_argument("--heap-gib", type=partial(_number), help="symmetric heap of a rank (default 1; 0.25 on CPUs)")
    return parser


def demo() -> argparse.ArgumentParser:
    about = "Split SmolLM2-135M-Instruct over ranks and compare its tokens with those of the unsplit model."
    parser = _Parser("iris-tp demo", description=about)
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: GPUs, if there are any")
    parser.add_argument("--ranks", type=ranks, help="default: one a GPU, four at most; 3 on CPUs")
    parser.add_argument(
        "--tokens", type=count, default=32, help="the largest number of new tokens (default %(default)s)"
    )
    parser.add_argument("--prompt", default=PROMPT, help="default: %(default)s")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bfloat16 on GPUs, float32 on CPUs")
    parser.add_argument("--engine", action="store_true", help="generate with layers.Engine, on GPUs from a CUDA graph")
    return parser


def plan() -> argparse.ArgumentParser:
    parser = _Parser("iris-tp plan", description="Explain which kernel a call would run. Needs no GPU and no ranks.")
    ops = "matmul_all_reduce, all_gather_matmul, matmul_all_gather or matmul_reduce_scatter"
    mixtures = "for a mixture of experts: moe_gate_up, moe_down_all_reduce or moe_down_reduce_scatter"
    parser.add_argument("op", nargs="?", help=f"{ops}; {mixtures}")
    size = partial(count, most=2**31 - 1)
    parser.add_argument("M", type=size, nargs="?", help="rows of the whole result; for a mixture, tokens")
    parser.add_argument(
        "N", type=size, nargs="?", help="columns of the whole result; for moe_gate_up, those of the gate"
    )
    parser.add_argument("K", type=size, nargs="?", help="depth of one rank's product")
    parser.add_argument("--html", metavar="FILE", help="write a page with sliders for all sizes to FILE instead")
    parser.add_argument("--ranks", "--world", dest="world", type=ranks, default=4, help="default: %(default)s")
    parser.add_argument("--gpu", choices=GPUS, help="default: this machine's, or h200 where there is none")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--form", help="the dimension that is gathered or scattered: rows (default), cols or k")
    parser.add_argument("--fp8", action="store_true", help="B in fp8, with a scale for each column")
    parser.add_argument("--weights", metavar="FORMAT", help="B's format: fp8, fp8_block, int4, int4/128, mxfp4, ...")
    parser.add_argument("--experts", type=int, help="for a mixture: the number of experts")
    parser.add_argument("--top-k", type=int, help="for a mixture: experts of a token (default 1)")
    help = "only kernels whose sums have one order (docs/concepts/determinism.md)"
    parser.add_argument("--invariant", dest="level", choices=("batch", "ranks"), help=help)
    parser.add_argument("--algorithm", help="the best plan of this algorithm, such as one_shot or sequential")
    return parser


def calibrate() -> argparse.ArgumentParser:
    about = "Measure this machine's rates and store them in the user's cache, where plans find them. Takes two minutes."
    parser = _Parser("iris-tp calibrate", description=about)
    parser.add_argument("--ranks", type=ranks, help="default: one a GPU")
    return parser


def bench(in_checkout: bool) -> argparse.ArgumentParser:
    """Return the parser of `bench`; `in_checkout`: whether to list the benchmarks of a checkout."""
    parser = _Parser(
        "iris-tp bench",
        description="Time an op, and torch's product and collective, on this machine. Both are checked first.",
        epilog=f"Benchmarks with their own options: {', '.join(IN_CHECKOUT)}" if in_checkout else None,
    )
    parser.add_argument("op", nargs="?", choices=CALLS.values(), help="default: all four")
    size = partial(count, most=2**31 - 1)
    parser.add_argument("M", type=size, nargs="?", help="rows of the whole result")
    parser.add_argument("N", type=size, nargs="?", help="columns of the whole result")
    parser.add_argument("K", type=size, nargs="?", help="depth of one rank's product")
    parser.add_argument("--ranks", type=ranks, help="default: one a GPU, or 2 on CPUs")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: GPUs, if there are any")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--heap-gib", type=_number, help="symmetric heap of a rank; default 4, on CPUs 0.25")
    parser.add_argument("--quick", action="store_true", help="a third of the time")
    return parser


def verify() -> argparse.ArgumentParser:
    parser = _Parser("iris-tp verify", description="Check guarantees on this machine: equal bits, or loaded weights.")
    levels = (
        "batch: equal bits for any number of rows; ranks: also for any number of ranks; load: weights equal the files"
    )
    parser.add_argument("level", choices=("batch", "ranks", "load"), help=levels)
    parser.add_argument("--model", help="a folder or a name on the hub; default: the model of iris-tp demo")
    how_many = "default: one a GPU, or 3 on CPUs; for `ranks` a list such as 1,2,4, each compared with the first"
    parser.add_argument("--ranks", type=_ranks_list, help=how_many)
    parser.add_argument("--batches", type=counts, help="batch sizes (default 2,7,64; on CPUs 2,7)")
    parser.add_argument("--steps", type=count, default=STEPS, help="tokens to generate (default %(default)s)")
    parser.add_argument(
        "--length", type=count, default=LENGTH, help="length of the prompt, in tokens (default %(default)s)"
    )
    parser.add_argument("--compile", action="store_true", help="compile decoder layers, as Engine(compile=True) does")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--weights", choices=WEIGHTS, help=_WEIGHTS_HELP)
    parser.add_argument("--heap-gib", type=_number, default=1.0, help="symmetric heap of a rank (default 1)")
    parser.add_argument("--nothing", action="store_true", help="use a context without guarantees, for comparison")
    return parser


def doctor() -> argparse.ArgumentParser:
    return _Parser("iris-tp doctor", description="List what this machine lacks, and how to get it.")


def checkout(package: Path) -> Path | None:
    """Return the folder of the checkout that the installed `package` belongs to, or else the current one."""
    for root in (package.parents[1], Path.cwd()):
        if (root / "benchmarks" / "ops.py").is_file() and (root / "iris_tp" / "cli.py").is_file():
            return root
    return None
