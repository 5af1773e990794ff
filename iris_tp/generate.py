"""Generate text with a Hugging Face checkpoint, split over ranks: `iris-tp generate MODEL "prompt"`.

The parent process reads the tokenizer and the configuration, and refuses bad ones before any rank starts. Then
each rank loads its own slices and runs transformers' `generate`. Rank 0 prints the text to stdout as it is generated;
progress goes to stderr. A typed error of a rank becomes one line there.

    iris-tp generate smollm2 "Name the first six months of the year." --chat --ranks 2
    iris-tp generate Qwen/Qwen3-8B "Once upon a time" --tokens 64 --weights fp8
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
import os
from pathlib import Path
import re
import sys
import tempfile
import time
from typing import Any

import torch

from . import launch, smollm2

_SMOLLM2 = ("smollm2", smollm2.NAME)
_ON_HUB = re.compile(r"[\w.-]+(/[\w.-]+)?")


class _RefusedError(Exception):
    """The reason for which no rank was started."""


@dataclass(frozen=True)
class Task:
    """A rank's task, in a form that travels to its process."""

    model: str
    prompt: list[int]
    options: dict[str, Any]
    """Options of transformers' `generate`."""
    dtype: torch.dtype | None
    weights: str | None
    heap_bytes: int
    seed: int


def run(args: argparse.Namespace) -> tuple[int, str]:
    """Generate by `args`; return the exit code, and for a refusal or a failure its reason."""
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # for the ranks, too
    on_gpu = torch.cuda.is_available()
    if args.device == "cuda" and not on_gpu:
        return 2, "--device cuda: torch sees no GPU"
    ranks = launch.default_ranks(on_cpu=2) if args.ranks is None else args.ranks
    try:
        launch.check_ranks(ranks)
        name = _model(args.model)
        if not on_gpu:
            launch.import_ahead(ranks, "transformers")
        task = _task(args, name, on_gpu)
        where = "GPUs" if on_gpu else "CPUs, in Triton's interpreter, which is slow"
        _progress(f"{ranks} rank{'s' * (ranks > 1)} on {where}")
        with tempfile.TemporaryDirectory(prefix="iris-generate-") as folder:
            launch.run_reporting(rank_main, ranks, Path(folder), task)
    except (_RefusedError, ValueError) as error:
        return 2, str(error)
    except launch.RankError as error:
        return 1, str(error)
    except KeyboardInterrupt:
        return 130, "interrupted"
    return 0, ""


def rank_main(results: Path, task: Task) -> None:
    """Load this rank's slices and generate. Rank 0 prints."""
    import iris
    import layers

    from transformers import AutoTokenizer, TextStreamer, logging  # isort: skip  (iris goes first: it may set up the interpreter)

    logging.set_verbosity_error()  # each rank would repeat transformers' warnings
    with launch.reporting(results), iris.iris(task.heap_bytes) as ctx:
        model = layers.from_pretrained(task.model, ctx, dtype=task.dtype, weights=task.weights)
        first = ctx.cur_rank == 0
        streamer = None
        if first:
            tokenizer = AutoTokenizer.from_pretrained(task.model, trust_remote_code=False)
            streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        prompt = torch.tensor([task.prompt], device=ctx.device)
        torch.manual_seed(task.seed)  # the same samples on every rank
        start = time.perf_counter()
        output = model.generate(prompt, attention_mask=torch.ones_like(prompt), streamer=streamer, **task.options)
        new, seconds = output.shape[1] - prompt.shape[1], time.perf_counter() - start
        if first:
            _progress(f"{new} tokens in {seconds:.1f} s, {new / seconds:.2f} tokens/s, the prompt included")


def _progress(message: str) -> None:
    print(f"iris-tp generate: {message}", file=sys.stderr, flush=True)


def _model(model: str) -> str:
    """Return the name for transformers to load: a folder, or a name on the hub."""
    if Path(model).is_dir():
        return model
    if model in _SMOLLM2:
        if commands := smollm2.missing():
            raise _RefusedError("packages are missing, which this installs: " + " && ".join(commands))
        return str(smollm2.checkpoint())
    if not _ON_HUB.fullmatch(model) or Path(model).exists():
        raise _RefusedError(f"MODEL is {model!r}; expected a folder, a name on the Hugging Face hub, or smollm2")
    return model


def _task(args: argparse.Namespace, name: str, on_gpu: bool) -> Task:
    """Return the task of the ranks. Raises `_RefusedError` for a checkpoint or a prompt that cannot work."""
    try:
        from transformers import AutoConfig, AutoTokenizer

        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except ImportError as error:
        raise _RefusedError(f"{_first_line(error)}; pip install 'iris-tp[hf]'") from error
    except Exception as error:  # of a hub, a file or a field: transformers raises many types
        offline = "" if Path(name).is_dir() else "; MODEL smollm2 needs no hub (docs/start/model.md)"
        raise _RefusedError(
            f"MODEL is {args.model!r}, which cannot be loaded: {_first_line(error)}{offline}"
        ) from error
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    if not args.chat:
        prompt = tokenizer(text)["input_ids"]
    elif tokenizer.chat_template is None:
        raise _RefusedError(f"--chat: the tokenizer of {args.model!r} has no chat template; leave --chat out")
    else:
        chat = [{"role": "user", "content": text}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    if not prompt:
        raise _RefusedError("PROMPT is empty; expected at least one token of text")
    most = getattr(config.get_text_config(), "max_position_embeddings", None)
    if most and len(prompt) + args.tokens > most:
        raise _RefusedError(
            f"PROMPT has {len(prompt)} tokens and --tokens is {args.tokens}; expected at most {most} together"
        )
    options: dict[str, Any] = {"max_new_tokens": args.tokens, "do_sample": args.temperature > 0}
    if args.temperature > 0:
        options |= {"temperature": args.temperature, "top_p": args.top_p}
    dtype = getattr(torch, args.dtype) if args.dtype else None if on_gpu else torch.float32
    heap = args.heap_gib or (1.0 if on_gpu else 0.25)
    return Task(name, list(prompt), options, dtype, args.weights, int(heap * 2**30), args.seed)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
