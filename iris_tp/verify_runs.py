"""Read and continue a prompt among others by a split model, for `verify` and `verify_ranks`.

The ranks that do so leave their results, or their typed errors, in a folder.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from . import launch

if TYPE_CHECKING:
    from iris.context import Iris


@contextmanager
def split(args: argparse.Namespace, results: Path) -> Iterator[tuple[torch.nn.Module, Iris]]:
    """Yield the model that `args` name, split, and its context, on a rank; write a typed error into `results`, too."""
    import iris
    import layers

    with launch.reporting(results), iris.iris(int(args.heap_gib * 2**30), invariant=args.promised) as ctx:
        yield layers.from_pretrained(args.model, ctx, dtype=getattr(torch, args.dtype), weights=args.weights), ctx


def modes_on(device: torch.device) -> tuple[str, ...]:
    """Return the modes in which a model can run on `device`."""
    return ("eager", "graphs") if device.type == "cuda" else ("eager",)


class _Watch:
    """Hooks that collect the outputs of modules for one row, in the order of calls; `compiled` modules count as one."""

    def __init__(self, model: torch.nn.Module, compiled: list, place: int, batch: int, length: int) -> None:
        self.place, self.batch, self.length = place, batch, length
        self.seen: list[tuple[str, str, torch.Tensor]] = []
        inside = {module for layer in compiled for module in layer.modules()}  # hooks there would compile each apart
        named = model.named_modules()
        watched = [(name, each) for name, each in named if each in compiled or (_is_leaf(each) and each not in inside)]
        self._hooks = [each.register_forward_hook(self._hook(name)) for name, each in watched]

    def _hook(self, name: str) -> Any:
        def keep(module: Any, inputs: Any, output: Any) -> None:
            row = self._row(output)
            if row is not None:
                self.seen.append((name, getattr(module, "served_by", type(module).__name__), row.clone()))

        return keep

    def _row(self, output: Any) -> torch.Tensor | None:
        """Return the row's own tokens, without its padding; a layer may return them in a tuple."""
        output = output[0] if isinstance(output, tuple) and output else output
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
def _watching(model: torch.nn.Module, compiled: list, place: int, batch: int, length: int) -> Iterator[_Watch]:
    watch = _Watch(model, compiled, place, batch, length)
    try:
        yield watch
    finally:
        watch.close()


def run_batch(
    model: torch.nn.Module, ctx: Iris, mode: str, prompts: list[list[int]], place: int, room: int, steps: int,
    compile: bool,
) -> tuple[list[torch.Tensor], list[tuple[str, str, torch.Tensor]]]:  # fmt: skip
    """Return (the row's logits after its prompt and of each step, outputs of modules while the prompts were read)."""
    import layers
    from layers.serving.compiled import decoder_layers

    engine = layers.Engine(model, ctx, len(prompts), room, graphs=mode == "graphs", compile=compile)
    compiled = decoder_layers(model, len(engine.cache.layers)) if compile else []
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
            with _watching(model, compiled, place, len(prompts), len(prompts[place])) as watch:
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
    """Return the row's logits for all rows of the batch, so that all continue alike."""
    return logits.expand(rows, *logits.shape).contiguous()


def unlike(a: torch.Tensor, b: torch.Tensor) -> int:
    if a.shape != b.shape:
        return a.numel()
    return int(a.contiguous().view(torch.uint8).ne(b.contiguous().view(torch.uint8)).view(*a.shape, -1).any(-1).sum())
