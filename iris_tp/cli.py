"""`iris-tp`: demo, plan, bench, verify, doctor.

    iris-tp demo [--ranks 3]                                         a real model on several ranks
    iris-tp plan matmul_all_reduce 2048 8192 2048 --ranks 4 --gpu h200    which kernel a call would take, and why
    iris-tp plan moe_down_all_reduce 4 2048 384 --experts 128 --top-k 8    the same of a mixture of experts
    iris-tp plan --html FILE                                         a page in which a reader moves the sizes
    iris-tp bench matmul_all_reduce 2048 8192 2048 --ranks 4         a call beside torch's product and collective
    iris-tp bench ops [--ranks 4]                                    `python -m benchmarks.ops` (in a checkout)
    iris-tp verify batch --model path                                whether a row's bits depend on the batch
    iris-tp doctor                                                   what this machine lacks, and how to get it
    iris-tp --version

`plan` is arithmetic: it needs neither a GPU nor ranks. Whatever follows `demo`, `bench` or `verify` is handed on.
The exit code is 0, or 1 where `doctor` finds something to fix, or 2 for a wrong question; else that of what was run.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
import os
from pathlib import Path
import runpy
import subprocess
import sys

_GPUS = {
    "h200": ("NVIDIA H200", 132),
    "h100": ("NVIDIA H100", 132),
    "mi300x": ("AMD Instinct MI300X", 304),
    "mi350x": ("AMD Instinct MI350X", 256),
    "interpreter": ("interpreter", 1),
}
_FORWARDED = ("demo", "bench", "verify")


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if rest and args.command not in _FORWARDED:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if args.command == "demo":
        from . import demo

        return demo.main(rest)
    if args.command == "bench":
        from .bench import command

        if rest and rest[0] in command.IN_CHECKOUT:
            return _forward(f"benchmarks.{rest[0]}", rest[1:])
        return command.main(rest)
    if args.command == "verify":
        from . import verify

        return verify.main(rest)
    if args.command == "doctor":
        from .doctor import examine, show

        return show(examine())
    if args.html is not None:
        if args != parser.parse_args(["plan", f"--html={args.html}"]):
            parser.error("plan: --html takes no op, no sizes and no other option: the page has a grid of them")
        return _plan_page(Path(args.html))
    if args.K is None:
        parser.error("plan: the following arguments are required: op, M, N, K (or --html FILE)")
    return _plan(args)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("iris-tp", description="Tensor-parallel layers over fused ops.")
    parser.add_argument("--version", action="version", version=f"iris-tp {_version()}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("demo", help="a real language model on several ranks", add_help=False)
    commands.add_parser("bench", help="measure on this machine", add_help=False)
    commands.add_parser("verify", help="whether bits are as promised, on this machine", add_help=False)
    commands.add_parser("doctor", help="what this machine lacks, and how to get it")
    plan = commands.add_parser("plan", help="which kernel a call would take, and why; needs no GPU")
    ops = "matmul_all_reduce, all_gather_matmul, matmul_all_gather or matmul_reduce_scatter"
    mixtures = "of a mixture of experts moe_gate_up, moe_down_all_reduce or moe_down_reduce_scatter"
    plan.add_argument("op", nargs="?", help=f"{ops}; {mixtures}")
    plan.add_argument("M", type=int, nargs="?", help="rows of the whole result; of a mixture, tokens")
    plan.add_argument("N", type=int, nargs="?", help="columns of the whole result; of moe_gate_up, of its gate alone")
    plan.add_argument("K", type=int, nargs="?", help="depth that one rank multiplies")
    plan.add_argument("--html", metavar="FILE", help="in place of all else: a page to move it in")
    plan.add_argument("--ranks", "--world", dest="world", type=int, default=4, help="how many (default 4)")
    plan.add_argument("--gpu", choices=_GPUS, help="default: this machine's, or h200 where there is none")
    plan.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    plan.add_argument("--form", help="along what is gathered or scattered: rows (default), cols or k, as the op has it")
    plan.add_argument("--fp8", action="store_true", help="B in eight bits, with a scale for each column")
    plan.add_argument("--experts", type=int, help="of a mixture: how many there are")
    plan.add_argument("--top-k", type=int, help="of a mixture: how many experts a token chooses (default 1)")
    plan.add_argument(
        "--invariant", choices=("batch", "ranks"), help="among ways of one order only (docs/concepts/determinism.md)"
    )
    plan.add_argument("--algorithm", help="the best of this one, as one_shot or sequential (FusedConfig.algorithm)")
    return parser


def _version() -> str:
    """By its file: `iris` may be what cannot be imported here."""
    return runpy.run_path(str(_package().with_name("version.py")))["__version__"]


def _package() -> Path:
    """The file of the package `iris`, which is not imported."""
    spec = find_spec("iris")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin)


def _plan(args: argparse.Namespace) -> int:
    from iris.errors import ArgumentError
    from iris_ops.planning.asked import asked
    from iris_ops.planning.machine import machine_named
    from iris_ops.planning.plan import plan
    import torch

    name, programs = _GPUS[args.gpu or "h200"]
    if args.gpu is None and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        name, programs = properties.name, properties.multi_processor_count
    try:
        sizes, dtype = (args.M, args.N, args.K, args.world), getattr(torch, args.dtype)
        problem = asked(args.op, *sizes, dtype, args.form, args.fp8, args.invariant, args.experts, args.top_k)
        chosen = plan(problem, machine_named(name, programs), algorithm=args.algorithm)
    except ArgumentError as error:
        print(f"iris-tp plan: {error}", file=sys.stderr)
        return 2
    print(f"{args.world} ranks, {name}\n{chosen.explain()}\n{chosen}")
    return 0


def _plan_page(file: Path) -> int:
    from .plan_page import Grid, MixtureGrid, page, survey

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("w") as written:  # before some seconds of arithmetic
            written.write(page(survey(Grid(), MixtureGrid())))
    except OSError as error:
        print(f"iris-tp plan: --html is {str(file)!r}, which cannot be written: {error}", file=sys.stderr)
        return 2
    print(file)
    return 0


def _forward(module: str, arguments: list[str]) -> int:
    """Runs a module of the checkout that these packages lie in, as a process of its own."""
    root = _package().parents[1]
    if not (root / f"{module.replace('.', '/')}.py").exists():
        print(
            f"iris-tp: {module} is part of the source checkout, not of the installed packages; run it from there, or"
            " `pip install -e` the checkout",
            file=sys.stderr,
        )
        return 2
    # where the user is, whose paths the arguments may name, but with no module from there
    paths = filter(None, (str(root), os.environ.get("PYTHONPATH")))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
    return subprocess.call([sys.executable, "-m", module, *arguments], env=environment)
