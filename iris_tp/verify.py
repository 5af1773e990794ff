"""Whether a row of a model's results has the same bits among any others, on this machine: `iris-tp verify batch`.

A prompt is read and continued alone, and then in batches of several sizes, in the first, middle and last place, beside
prompts as long as itself and beside longer ones, before which it is padded: eagerly and, on GPUs, from CUDA graphs.
Compared are the logits behind the prompt and of each step, bit by bit. Where an eager run differs, what each module
gave for the row says which was the first.

    iris-tp verify batch --model path --ranks 2
    iris_tp.verify.batch(model, ctx)        the same of a split model, as a list of findings

`iris-tp verify ranks` is in `verify_ranks.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
import json
import os
from pathlib import Path
import sys
import tempfile
from typing import TYPE_CHECKING, Any

import torch

from . import launch

if TYPE_CHECKING:
    from iris.context import Iris

BATCHES = (2, 7, 64)
LENGTH, LONGER, STEPS = 12, 7, 3


@dataclass(frozen=True)
class Finding:
    """One batch. `differing`: numbers of the row's logits that have other bits than alone. `first`: where they begin:
    module and op, if that was looked for and found.
    """

    mode: str
    batch: int
    place: int
    padding: int
    differing: int
    first: str = ""


class _Watch:
    """What modules gave for one row, in the order in which they were called."""

    def __init__(self, model: torch.nn.Module, place: int, batch: int, length: int) -> None:
        self.place, self.batch, self.length = place, batch, length
        self.seen: list[tuple[str, str, torch.Tensor]] = []
        watched = [(name, each) for name, each in model.named_modules() if _is_leaf(each)]
        self._hooks = [each.register_forward_hook(self._hook(name)) for name, each in watched]

    def _hook(self, name: str) -> Any:
        def keep(module: Any, inputs: Any, output: Any) -> None:
            row = self._row(output)
            if row is not None:
                self.seen.append((name, getattr(module, "served_by", type(module).__name__), row.clone()))

        return keep

    def _row(self, output: Any) -> torch.Tensor | None:
        """The row's own tokens, without its padding."""
        if not isinstance(output, torch.Tensor) or output.dim() < 2:
            return None
        if output.shape[0] != self.batch:
            if output.dim() > 2 or output.shape[0] % self.batch:
                return None
            output = output.view(self.batch, -1, output.shape[-1])
        row = output[self.place]
        return row[-self.length :] if row.dim() > 1 else row

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _is_leaf(module: torch.nn.Module) -> bool:
    return not any(True for _ in module.children()) and not type(module).__name__.endswith("Embedding")


@contextmanager
def _watching(model: torch.nn.Module, place: int, batch: int, length: int) -> Iterator[_Watch]:
    watch = _Watch(model, place, batch, length)
    try:
        yield watch
    finally:
        watch.close()


def batch(
    model: torch.nn.Module, ctx: Iris, batches: Sequence[int] = BATCHES, steps: int = STEPS, length: int = LENGTH,
    compile: bool = False,
) -> list[Finding]:  # fmt: skip
    """A finding for each batch of a split `model`. Collective; all ranks find the same, of their own logits.

    Raises `ArgumentError` as `layers.Engine` does.
    """
    config: Any = model.config
    words = config.get_text_config().vocab_size
    draw = torch.Generator().manual_seed(0)
    prompt = torch.randint(3, words, (length,), generator=draw).tolist()
    room = length + LONGER + steps + 1
    modes = ["eager"] + (["graphs"] if ctx.device.type == "cuda" else [])
    found = []
    for mode in modes:
        alone = run_batch(model, ctx, mode, [prompt], 0, room, steps, compile)
        for size in batches:
            for place in sorted({0, size // 2, size - 1}):
                for padding in (0, LONGER) if size > 1 else (0,):
                    others = torch.randint(3, words, (size, length + padding), generator=draw).tolist()
                    others[place] = prompt
                    logits, seen = run_batch(model, ctx, mode, others, place, room, steps, compile)
                    differing = sum(unlike(a, b) for a, b in zip(alone[0], logits, strict=True))
                    first = _first(alone[1], seen) if differing and mode == "eager" else ""
                    found.append(Finding(mode, size, place, padding, differing, first))
    return found


def run_batch(
    model: torch.nn.Module, ctx: Iris, mode: str, prompts: list[list[int]], place: int, room: int, steps: int,
    compile: bool,
) -> tuple[list[torch.Tensor], list[tuple[str, str, torch.Tensor]]]:  # fmt: skip
    """(the row's logits behind its prompt and of each step, what modules gave for it while the prompts were read)."""
    import layers

    engine = layers.Engine(model, ctx, len(prompts), room, graphs=mode == "graphs", compile=compile)
    longest = max(map(len, prompts))
    rows = torch.tensor([[0] * (longest - len(row)) + row for row in prompts], device=ctx.device)
    mask = torch.tensor([[False] * (longest - len(row)) + [True] * len(row) for row in prompts], device=ctx.device)
    given = None if mask.all() else mask
    seen: list[tuple[str, str, torch.Tensor]] = []
    for _ in range(3 if mode == "graphs" else 1):  # eager, captured, replayed
        engine.reset()
        if mode == "graphs":
            logits = [engine.prefill(rows, given)]
        else:
            with _watching(model, place, len(prompts), len(prompts[place])) as watch:
                logits = [engine.read(rows, given)]
                seen = watch.seen
        logits = [logits[0][place].clone()]
        engine.accept(_same(logits[0], len(prompts)))
        for _ in range(steps):
            if mode == "graphs":
                engine.decode()
                logits.append(engine.logits[place].clone())
            else:
                logits.append(engine.step()[place].clone())
    return logits, seen


def _same(logits: torch.Tensor, rows: int) -> torch.Tensor:
    """The row's logits for all rows of the batch: whatever they hold, all go on."""
    return logits.expand(rows, *logits.shape).contiguous()


def unlike(a: torch.Tensor, b: torch.Tensor) -> int:
    if a.shape != b.shape:
        return a.numel()
    return int(a.contiguous().view(torch.uint8).ne(b.contiguous().view(torch.uint8)).view(*a.shape, -1).any(-1).sum())


def _first(alone: list, among: list) -> str:
    for (name, op, a), (_, _, b) in zip(alone, among, strict=False):
        if count := unlike(a, b):
            return f"{name} ({op}), {count} of {a.numel()} numbers"
    return "no module that was watched while the prompts were read: attention, or a step"


def table(found: Sequence[Finding]) -> str:
    head = f"{'mode':<8}{'batch':>6}{'place':>7}{'padding':>9}{'numbers that differ':>21}  first difference"
    rows = [
        f"{each.mode:<8}{each.batch:>6}{each.place:>7}{each.padding:>9}{each.differing:>21}  {each.first}"
        for each in found
    ]
    return "\n".join([head, *rows])


def _rank_main(args: argparse.Namespace, results: Path) -> None:
    import iris
    import layers

    with iris.iris(int(args.heap_gib * 2**30), invariant=args.invariant) as ctx:
        model = layers.from_pretrained(args.model, ctx, dtype=getattr(torch, args.dtype))
        found = batch(model, ctx, args.batches, args.steps, args.length, args.compile)
        (results / f"{ctx.cur_rank}.json").write_text(json.dumps([vars(each) for each in found]))


def main(argv: list[str]) -> int:
    from . import verify_ranks

    parser = argparse.ArgumentParser("iris-tp verify", description="Whether bits are as promised, on this machine.")
    levels = "batch: the same bits at every number of rows; ranks: also at every number of ranks"
    parser.add_argument("level", choices=("batch", "ranks"), help=levels)
    parser.add_argument("--model", help="a folder or a name that transformers loads; default: that of iris-tp demo")
    how_many = "how many; default: one a GPU, or 3 on CPUs. For ranks several, of which each is compared with the first"
    parser.add_argument("--ranks", type=_numbers, help=how_many)
    parser.add_argument("--batches", type=_numbers, help="sizes, as 2,7,64")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"tokens behind the prompt (default {STEPS})")
    parser.add_argument("--length", type=int, default=LENGTH, help=f"of the prompt, in tokens (default {LENGTH})")
    parser.add_argument("--compile", action="store_true", help="decoder layers compiled, as Engine(compile=True)")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--heap-gib", type=float, default=1.0, help="symmetric heap of a rank (default 1)")
    parser.add_argument("--nothing", action="store_true", help="of a context that promises nothing, to compare")
    args = parser.parse_args(argv)
    args.invariant = None if args.nothing else args.level
    if args.level == "ranks":
        args.ranks = args.ranks or tuple(range(1, launch.default_ranks() + 1))
        args.batches = args.batches or verify_ranks.BATCHES
        if "RANK" in os.environ:
            parser.error("verify ranks starts its own ranks: call it without torchrun")
    else:
        args.batches = args.batches or BATCHES
        if args.ranks and len(args.ranks) > 1:
            parser.error(f"--ranks is {','.join(map(str, args.ranks))}: expected one number, or the level ranks")
    if args.model is None:
        from . import smollm2

        if lacking := smollm2.missing():
            print("iris-tp verify: first " + " && ".join(lacking), file=sys.stderr)
            return 2
        args.model = str(smollm2.checkpoint())
    if args.level == "ranks":
        return verify_ranks.main(args)
    with tempfile.TemporaryDirectory(prefix="iris-verify-") as folder:
        launch.run(_rank_main, args.ranks[0] if args.ranks else None, args, Path(folder))
        by_rank = [
            [Finding(**each) for each in json.loads(path.read_text())] for path in sorted(Path(folder).glob("*.json"))
        ]
    worst = max(by_rank, key=lambda found: sum(each.differing for each in found))
    print(table(worst))
    unlike = sum(each.differing > 0 for each in worst)
    print(f"{len(worst)} batches on {len(by_rank)} ranks, {unlike} differ: {'no' if unlike else 'yes, the same bits'}")
    return 1 if unlike else 0


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))
