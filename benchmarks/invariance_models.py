"""Whether whole models keep their bits: `python -m benchmarks.invariance_models --ranks 2`.

Models have the shapes of Llama-3-8B and Qwen3-32B and random weights, the same on any number of ranks. For each

    batch   a context with `invariance="batch"` reads and continues a prompt alone, and in batches of 7, 64 and 200
    ranks   contexts with "ranks", one of all ranks and one of a single rank, do so, and are compared

eagerly and, on GPUs, from CUDA graphs; with `--compile` also from CUDA graphs of compiled decoder layers. Compared are
the logits after the prompt and of each step, bit by bit, and so the tokens. Writes a JSON file. Exits with 1 where a
bit differs.
"""

import argparse
import copy
from functools import partial
import sys
import time

import iris
from iris_tp import verify, verify_ranks
from iris_tp.bench.team import Team, launch
import torch
from torch import distributed, nn

from benchmarks.cases import whole_models
from benchmarks.measuring import report
from benchmarks.measuring.ahead import compile_ahead

BATCHES = {"cuda": (7, 64, 200), "cpu": (3, 7)}
LENGTH, STEPS = 12, 3
_TINY = dict(vocab_size=256, hidden_size=128, intermediate_size=384, num_attention_heads=4, num_key_value_heads=2)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    report.add_arguments(parser, dtype="bfloat16")
    parser.add_argument("--models", default="llama-3-8b,qwen3-32b", help="shapes, on GPUs; default: %(default)s")
    parser.add_argument("--layers", type=report.numbers, help="of each model, as 32,8; default: all")
    parser.add_argument("--compile", action="store_true", help="with compiled decoder layers, too")
    parser.add_argument(
        "--steps", type=report.at_least(1), default=STEPS, help="after the prompt; default: %(default)s"
    )
    args = parser.parse_args(argv)
    report.settle(args, argv, "invariance_models")
    args.models = args.models.split(",") if args.device == "cuda" else ["tiny"]
    args.layers = args.layers or [None] * len(args.models)
    if len(args.layers) != len(args.models):
        parser.error(f"--layers: {len(args.layers)} numbers; expected {len(args.models)}, one of each model")
    return args


def whole_model(name: str, depth: int | None, device: torch.device) -> nn.Module:
    """Return a model with random weights, the same in each process."""
    from transformers import AutoModelForCausalLM

    config = whole_models.config_of(name, depth)
    if name == "tiny":
        for key, value in _TINY.items():
            setattr(config, key, value)
        config.head_dim = config.hidden_size // config.num_attention_heads
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.requires_grad_(False).eval()


def split(whole: nn.Module, ctx: iris.Iris) -> nn.Module:
    import layers

    model = copy.deepcopy(whole)
    layers.parallelize(model, ctx)
    return model


def verdicts(team: Team, args: argparse.Namespace, name: str, whole: nn.Module) -> list[dict]:
    """Return one row for each level, way to run and batch: how many numbers have other bits, on the rank with most."""
    heap, sizes = int(args.heap_gib * 2**30), BATCHES[team.device.type]
    rows: list[dict] = []
    begin = time.monotonic()

    def keep(level: str, compiled: bool, findings: list) -> None:
        counts = team.slowest([float(each.differing) for each in findings])
        for each, differing in zip(findings, counts, strict=True):
            row = {"model": name, "level": level, "mode": "compiled" if compiled else each.mode, "batch": each.batch}
            rows.append({**row, "differing": int(differing), "first": each.first})
        worst = sum(map(int, counts))
        seconds = time.monotonic() - begin
        way = "compiled" if compiled else "eager, and graphs on GPUs"
        team.say(f"[{seconds:4.0f} s] {name}, {level}, {way}: {len(findings)} batches, {worst} numbers differ")

    def precompile(contexts: list[iris.Iris], *calls) -> None:
        if team.cuda:
            kernels = compile_ahead(team, contexts, lambda: [call() for call in calls])
            team.say(f"[{time.monotonic() - begin:4.0f} s] {kernels} kernels compiled")

    with iris.iris(heap, invariant="batch") as ctx:
        parted = split(whole, ctx)
        given = {"batches": sizes, "steps": args.steps, "length": LENGTH, "thorough": False}
        precompile([ctx], partial(verify.batch, parted, ctx, **given, modes=("eager",)))
        for compiled in (False, True)[: 1 + (args.compile and team.cuda)]:
            keep("batch", compiled, verify.batch(parted, ctx, compile=compiled, modes=_modes(compiled), **given))
    del parted
    alone = iris.iris(heap, group=args.groups[team.rank], invariant="ranks")
    with iris.iris(heap, invariant="ranks") as ctx, alone:
        one, many = split(whole, alone), split(whole, ctx)
        numbers = (1, *sizes)

        def read(model: nn.Module, ctx: iris.Iris, compiled: bool, **more):
            return verify_ranks.read(model, ctx, numbers, args.steps, LENGTH, compiled, **more)

        eager = ("eager",)
        precompile(
            [alone, ctx], lambda: read(one, alone, False, modes=eager), lambda: read(many, ctx, False, modes=eager)
        )
        for compiled in (False, True)[: 1 + (args.compile and team.cuda)]:
            first, readings = (read(*each, compiled, modes=_modes(compiled)) for each in ((one, alone), (many, ctx)))
            keep("ranks", compiled, verify_ranks.compared(first, [readings], team.world))
    return rows


def _modes(compiled: bool) -> tuple[str, ...] | None:
    """Return graphs only for compiled layers, whose first pass is eager: each mode would compile them anew."""
    return ("graphs",) if compiled else None


def run(team: Team, args: argparse.Namespace) -> None:
    args.groups = [distributed.new_group([rank]) for rank in range(team.world)]
    written = report.describe_run(team, args) | {"length": LENGTH, "steps": args.steps, "rows": []}
    for name, depth in zip(args.models, args.layers, strict=True):
        whole = whole_model(name, depth, team.device)
        rows = verdicts(team, args, name, whole)
        written["rows"] += [{**row, "layers": whole.config.num_hidden_layers} for row in rows]
        if team.rank == 0:
            report.write(written, args)
    differing = sum(row["differing"] for row in written["rows"])
    team.say(f"{len(written['rows'])} batches: {differing} numbers differ")
    if differing:
        sys.exit(1)


def main(argv: list[str] | None = None) -> int:
    return launch(run, parse(argv), limit_s=600)


if __name__ == "__main__":
    sys.exit(main())
