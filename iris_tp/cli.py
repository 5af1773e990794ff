"""`iris-tp`: generate, demo, plan, calibrate, bench, verify, doctor.

    iris-tp generate MODEL "prompt" [--chat] [--ranks 2]              generated text from a checkpoint, streamed
    iris-tp demo [--ranks 3]                                         a small model, compared with the unsplit one
    iris-tp plan matmul_all_reduce 2048 8192 2048 --ranks 4 --gpu h200    which kernel a call would take, and why
    iris-tp plan moe_down_all_reduce 4 2048 384 --experts 128 --top-k 8    the same for a mixture of experts
    iris-tp plan --html FILE                                         an interactive page of sizes
    iris-tp calibrate [--ranks 4]                                    measure this machine's rates, for plans
    iris-tp bench matmul_all_reduce 2048 8192 2048 --ranks 4         a call and torch's product and collective
    iris-tp bench ops [--ranks 4]                                    `python -m benchmarks.ops` (in a checkout)
    iris-tp verify batch --model path                                check that a row's bits do not depend on the batch
    iris-tp verify load --model path --ranks 2                       check that each kind of weight is as it is stored
    iris-tp doctor                                                   list what this machine lacks, and how to get it
    iris-tp --version

`plan` is arithmetic: it needs neither a GPU nor ranks. `arguments` parses a command's arguments before the command's
module is imported, so `--help` and a wrong argument need no torch. The exit code is 0 on success, 1 where `doctor`
finds something to fix or a comparison fails, 2 for a refusal, with one line that gives its reason, and 141 where the
reader of the output closes the pipe.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.util import find_spec
import os
from pathlib import Path
import runpy
import subprocess
import sys

from . import arguments
from .torchrun import report_failure, started_by_torchrun

_NEEDED = ("torch", "triton", "numpy", "safetensors")
_UNREAD = 141  # the exit code of a shell's command that a closed pipe ends
_STARTS_RANKS = ("generate", "demo", "calibrate", "verify")


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args, rest = arguments.main(_version()).parse_known_args(argv[:1])
    command, rest = args.command, [*rest, *argv[1:]]
    try:
        code, message = _run(command, rest)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes again when it exits
        return _UNREAD
    except ImportError as error:  # a dependency that is broken, or of a version that iris does not work with
        code, message = 2, f"{error}; `iris-tp doctor` lists what to install"
    if message:
        report_failure(f"iris-tp {command}: {message}")
    return code


def _run(command: str, rest: list[str]) -> tuple[int, str]:
    """Return the exit code, and for a refusal its reason."""
    if command == "doctor":
        arguments.doctor().parse_args(rest)
        from .doctor import examine, show

        return show(examine()), ""
    if command == "bench":
        root = arguments.checkout(_package())
        if rest and rest[0] in arguments.IN_CHECKOUT:
            return _forward(f"benchmarks.{rest[0]}", rest[1:], root)
        args = arguments.bench(in_checkout=root is not None).parse_args(rest)
    else:
        args = getattr(arguments, command)().parse_args(rest)
    if lacking := [name for name in _NEEDED if find_spec(name) is None]:
        return 2, f"{' and '.join(lacking)} not installed; `iris-tp doctor` lists what to install"
    if command in _STARTS_RANKS and started_by_torchrun():
        return 2, "this command starts its own ranks; run it without torchrun, with --ranks"
    if command == "plan":
        return _plan(args)
    if command == "generate":
        from . import generate

        return generate.run(args)
    if command == "calibrate":
        from . import calibrate

        return calibrate.run(args)
    if command == "demo":
        from . import demo

        return demo.main(rest), ""
    if command == "bench":
        from .bench import command as bench

        return bench.main(rest), ""
    from . import verify

    return verify.main(rest), ""


def _version() -> str:
    """Return the version from its file: `iris` may fail to import."""
    return runpy.run_path(str(_package().with_name("version.py")))["__version__"]


def _package() -> Path:
    """Return the file of the package `iris`, without importing it."""
    spec = find_spec("iris")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin)


def _plan(args: argparse.Namespace) -> tuple[int, str]:
    if args.html is not None:
        if args != arguments.plan().parse_args([f"--html={args.html}"]):
            return 2, "--html takes no op, no sizes and no other option: the page has a grid of them"
        return _plan_page(Path(args.html))
    if args.K is None:
        return 2, "the following arguments are required: op, M, N, K (or --html FILE)"
    from iris.errors import ArgumentError, PlatformError
    from iris.machines import calibrated, machine_named
    from iris_ops.planning.plan import plan
    from iris_ops.planning.weights import named_format
    from iris_ops.problem import Request, requested_problem
    import torch

    name, programs = arguments.GPUS[args.gpu or "h200"]
    if args.gpu is None and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        name, programs = properties.name, properties.multi_processor_count
    try:
        machine = calibrated(machine_named(name, programs))
        sizes, dtype = (args.M, args.N, args.K, args.world), getattr(torch, args.dtype)
        weights, mixture = named_format(args.weights, args.fp8), (args.experts, args.top_k)
        request = Request(args.op, *sizes, dtype, args.form, weights, args.level, *mixture)
        chosen = plan(requested_problem(request), machine, algorithm=args.algorithm)
    except (ArgumentError, PlatformError) as error:
        return 2, str(error)
    print(f"{args.world} ranks, {name}\n{chosen.explain()}")
    return 0, ""


def _plan_page(file: Path) -> tuple[int, str]:
    from .plan_page import Grid, MixtureGrid, page, survey

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("w") as written:  # before some seconds of arithmetic
            written.write(page(survey(Grid(), MixtureGrid())))
    except OSError as error:
        return 2, f"--html is {str(file)!r}, which cannot be written: {error}"
    print(file)
    return 0, ""


def _forward(module: str, rest: Sequence[str], root: Path | None) -> tuple[int, str]:
    """Run a module of the checkout at `root` as a separate process."""
    if root is None:
        return 2, f"{module} is part of the source checkout, not of the installed packages; run it in a checkout"
    # run in the user's working directory, as arguments may hold relative paths, but import no module from there
    paths = filter(None, (str(root), os.environ.get("PYTHONPATH")))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
    return subprocess.call([sys.executable, "-m", module, *rest], env=environment), ""
