"""Tokens per second of a whole model, ours and others: `python -m benchmarks.llm --model llama-3-8b --ranks 4`.

For each row, a batch of prompts of one length: every contender is checked first (logits of the prompts' last tokens and
of a step, both eager and replayed: see `truth`), then all are timed in turns: the time to first token and steps, each
replayed from a CUDA graph, where the engine keeps one, and eager. Times are of the wall clock from a common start, the
slowest rank counted, and medians over the rounds. A contender that raises or is wrong is named and not timed.

Rows: every `--batches` at the first of `--prompts`, and the first batch at every prompt. Prints the table and writes
`llm_<model>_<gpu>_x<ranks>.json` after every row. `python -m benchmarks.report FILE --plots` draws it.
"""

import argparse
from collections.abc import Callable
from functools import partial
import os
import statistics
import sys
import time

from iris_tp.bench.team import Team, launch
import torch

from benchmarks.cases import engines, mixtures, stored_models, truth, vllm_engine, whole_models
from benchmarks.measuring import report
from benchmarks.tables.every_row import render

EAGER_STEPS = 4
WARM_S, MOST_WARM = 1.0, 8  # of prompts before the one that is timed, after a first one: after a change a chip hunts


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    report.add_arguments(parser)
    parser.add_argument("--model", help=f"one of {', '.join(whole_models.SHAPES)}, or a checkpoint's folder")
    number, numbers = report.at_least(1), report.numbers
    parser.add_argument("--layers", type=number, help="shorten the model to this number of layers")
    parser.add_argument("--batches", type=numbers, default="1,16,64", help="batch sizes; default: %(default)s")
    parser.add_argument(
        "--prompts", type=numbers, default="128,8192", help="lengths of prompts in tokens; default: %(default)s"
    )
    parser.add_argument("--output", type=number, default=33, help="generated tokens; default: %(default)s")
    parser.add_argument(
        "--contenders",
        type=report.some_of(engines.NAMES),
        default="ours,nccl,sequence-nccl,transformers",
        help="default: %(default)s",
    )
    parser.add_argument(
        "--alone",
        action="store_true",
        help="build the only contender, such as ours-mxfp4, without a model in bf16 beside it, for want of memory",
    )
    parser.add_argument("--rounds", type=number, default=3, help="measurements of each contender; default: %(default)s")
    parser.add_argument(
        "--torch-attention", action="store_true", help="use torch's attention in steps too, for all contenders"
    )
    parser.add_argument(
        "--compile", action="store_true", help="run decoder layers under torch.compile, where a contender can"
    )
    parser.add_argument("--profile", action="store_true", help="print the time of each kernel, in prompts and in steps")
    parser.add_argument("--quick", action="store_true", help="one round, one batch, one prompt length")
    parser.add_argument(
        "--vllm-limit", type=report.at_least(1.0), default=240, help="seconds for vLLM's start and rows; %(default)s"
    )
    parser.set_defaults(dtype=None)  # which depends on the device
    args = parser.parse_args(argv)
    report.settle(args, argv, "llm")
    gpu = args.device == "cuda"
    args.dtype = args.dtype or ("bfloat16" if gpu else "float32")
    args.vllm = {}
    if {*engines.APART} & {*args.contenders} and "RANK" in os.environ:
        parser.error(f"--contenders {', '.join(engines.APART)}: expected no torchrun, for vLLM starts ranks of its own")
    if not gpu and set(args.contenders) == {engines.ASYNC_TP}:
        parser.error("--contenders async-tp: expected others on CPUs, for it needs GPUs")
    args.model = args.model or ("llama-3-8b" if gpu else "tiny")
    if not gpu and args.model == "tiny":
        args.prompts, args.output = [min(n, 16) for n in args.prompts], min(args.output, 5)
    if args.quick:
        args.rounds, args.batches, args.prompts = 1, args.batches[:1], args.prompts[:1]
    if args.model not in whole_models.SHAPES and not os.path.isdir(args.model):
        parser.error(
            f"--model {args.model}: expected one of {', '.join(whole_models.SHAPES)}, or a checkpoint's folder"
        )
    args.own = [key for key in args.contenders if key not in engines.APART]
    if args.alone and (len(args.own) != 1 or args.own[0] not in engines.STORED or os.path.isdir(args.model)):
        parser.error(f"--alone: expected one of {', '.join(engines.STORED)} among --contenders, and a model's shape")
    args.title = args.model.rstrip("/").rpartition("/")[2]
    args.command = args.command.replace(args.model, args.title)  # no folders of this machine
    shape = args.title + (f"-{args.layers}layers" if args.layers else "")
    args.benchmark = f"llm_{shape}" + ("_compiled" if args.compile else "")
    return args


def rows_of(args: argparse.Namespace) -> list[tuple[int, int]]:
    """Return (batch, prompt length) of each row."""
    rows = [(batch, args.prompts[0]) for batch in args.batches]
    return list(dict.fromkeys(rows + [(args.batches[0], prompt) for prompt in args.prompts]))


def run(team: Team, args: argparse.Namespace) -> None:
    import iris

    begin = time.monotonic()

    def say(text: str) -> None:
        team.say(f"[{time.monotonic() - begin:4.0f} s] {text}")

    def is_late() -> bool:
        return time.monotonic() - begin > args.time_limit

    ctx = iris.iris(int(args.heap_gib * 2**30))
    dtype = getattr(torch, args.dtype)
    if args.alone:
        model, exact = stored_models.drawn(args.model, args.layers, ctx, dtype, engines.STORED[args.own[0]])
    else:
        model, exact = whole_models.build(args.model, args.layers, ctx, dtype), None
    config = model.config
    team.synchronize()
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    say(f"{args.title}, {config.num_hidden_layers} layers: {weights / 2**30:.2f} GiB of weights on each rank")
    if (top_k := mixtures.top_k_of(model)) and (uneven := mixtures.load(model, top_k)):
        say(
            f"random routers, rows scaled: the busiest expert gets {uneven[0]:.1f} times the mean,"
            f" the idlest {uneven[1]:.2f}"
        )
    # cuBLAS + NCCL: by whose errors the others' are judged
    if args.alone:
        contenders, failed = [engines.in_format(args.own[0], exact, model, ctx)], {}
        exact = engines.by_nccl(exact, ctx)
    else:
        contenders, failed = engines.contenders(team, ctx, model, list(dict.fromkeys([*args.own, engines.NCCL])))
    if engines.NCCL in failed:
        raise RuntimeError(f"{engines.NAMES[engines.NCCL]}: {failed[engines.NCCL]}")
    missing = [f"{engines.NAMES[key]}: {each['failed']}" for key, each in args.vllm.items() if "failed" in each]
    measured = {
        **report.describe_run(team, args),
        "model": args.title,
        "layers": config.num_hidden_layers,
        "shortened": bool(args.layers),
        "compiled": args.compile,
        "output": args.output,
        "allowed": {"times": truth.ALLOWED, "eps": truth.FLOOR, "fp8": truth.FP8},
        "weights_gib": weights / 2**30,
        "notes": [f"{engines.NAMES[key]}: {reason}" for key, reason in failed.items()] + missing,
        "rows": [],
    }
    rows = rows_of(args)
    for number, (batch, prompt) in enumerate(rows, 1):
        elapsed = team.slowest([time.monotonic() - begin])[0]
        if elapsed > args.time_limit:
            say(f"stopped: {len(rows) - number + 1} rows left out")
            break
        row = run_row(team, ctx, contenders, batch, prompt, args, is_late, exact)
        for each in args.vllm.values():
            if "rows" in each:
                row["results"].append(vllm_engine.result_of(each, batch, prompt))
        if args.vllm:
            row["results"].sort(key=lambda result: args.contenders.index(result["key"]))
        measured["rows"].append(row)
        measured["left_out"] = [f"{batch} x {prompt}" for batch, prompt in rows[number:]]
        say(f"{number}/{len(rows)} batch {batch}, prompt {prompt}: " + " | ".join(map(summary, row["results"])))
        if team.rank == 0:
            report.write(measured, args)
    team.say("\n" + render(measured))
    for contender in contenders:
        if contender.key in engines.PROMISING:
            contender.context.close()
    ctx.close()


def summary(result: dict) -> str:
    if result["status"] != "ok":
        return f"{result['name']} {result['status']} ({result['notes'][-1]})"
    first, step = (result.get(f"{key}_graph_ms", result.get(f"{key}_eager_ms", 0)) for key in ("first", "step"))
    return f"{result['name']} first {first:.1f} ms, step {step:.2f} ms"


def run_row(
    team: Team, ctx, contenders, batch: int, prompt: int, args, late: Callable[[], bool], base=None
) -> dict:  # fmt: skip
    """Measure each contender; cuBLAS + NCCL is among them, and omitted from the results unless requested.

    `base`: whose model gives the true logits, by its own numbers or by a contender's in their place; cuBLAS + NCCL, if
    None. A contender that is alone is right if it misses by no more than whoever is right at most.
    """
    from layers import Engine

    length = -(-(prompt + args.output + 2 * EAGER_STEPS + 4) // 64) * 64  # masks need whole vectors
    random = torch.Generator().manual_seed(7)
    ordered = sorted(contenders, key=lambda each: each.key != engines.NCCL)
    vocabulary = min(ordered[0].model.config.vocab_size, 30000)
    tokens = torch.randint(0, vocabulary, (batch, prompt + 1), generator=random).to(team.device)
    prompts, cache = tokens[:, :-1].contiguous(), None
    row: dict = {"batch": batch, "prompt": prompt, "truth_s": 0.0, "results": []}
    row["compared"] = truth.rows_compared(batch, prompt)
    base, exact = base or ordered[0], None
    if any(contender.convert is truth.as_it_is for contender in ordered):
        exact, row["truth_s"] = find_truth(team, base, tokens, length)
    limits: dict[bool, float] = {}  # of those whose inputs are rounded to fp8, and of the others
    if exact is None:
        most = truth.MOST_MIXTURE if mixtures.top_k_of(ordered[0].model) else truth.MOST
        limits = {False: most, True: truth.MOST_FP8}
    ready = []
    for contender in ordered:
        result = {"key": contender.key, "name": contender.name, "status": "ok", "notes": []}
        if contender.key in args.contenders:
            row["results"].append(result)
        fp8, expected = contender.rounds_inputs, exact
        if contender.convert is not truth.as_it_is:
            expected, taken = find_truth(team, base, tokens, length, contender.convert)
            row["truth_s"] += taken
        began, held = time.monotonic(), allocated(team)

        def warm_up(compile, contender=contender, cache=cache):
            contender.prepare()
            own = contender.key != engines.TRANSFORMERS and not args.torch_attention  # theirs is unchanged
            options = {"step_attention": own and team.cuda, "compile": compile}
            served_by = contender.context if contender.key in engines.PROMISING else ctx
            engine = Engine(contender.model, served_by, batch, length, cache=cache, **options)
            return engine, check(team, engine, tokens)

        outcome, reason = team.attempt(lambda warm_up=warm_up: warm_up(args.compile))
        if reason and args.compile:
            refusal = f"not compiled ({reason})"
            outcome, reason = team.attempt(lambda warm_up=warm_up: warm_up(False))
            result["notes"] += [] if reason else [refusal]
        result["warm_up_s"] = team.slowest([time.monotonic() - began])[0]
        if reason:
            result.update(status="n/a", notes=[reason])
            continue
        engine, logits = outcome
        cache = engine.cache
        result["errors"] = truth.errors(team, logits, expected)
        if contender is ordered[0] and exact is not None:
            dtype, mixture = getattr(torch, args.dtype), mixtures.top_k_of(contender.model) > 0
            limits = {of: truth.limit(result["errors"], dtype, of, mixture) for of in (False, True)}
            row.update(limit=limits[False], limit_fp8=limits[True])
        worst = max(result["errors"].values())
        if not worst <= limits.get(fp8, 0):
            accepted = f"at most {limits[fp8]:.2g}" if limits else "nothing, without cuBLAS + NCCL"
            note = f"logits are off by {worst:.2g} of their root mean square: accepted is {accepted}"
            result.update(status="WRONG", notes=[*result["notes"], note])
            continue
        if contender.key not in args.contenders:
            continue
        result["memory_gib"] = team.slowest([(allocated(team, peak=True) + contender.heap()) / 2**30])[0]
        result["memory_above_start_gib"] = team.slowest([(allocated(team, peak=True) - held) / 2**30])[0]
        ready.append((contender, engine, result, {}))
    for _ in range(args.rounds):
        for contender, engine, result, samples in ready:
            if result["status"] != "ok":
                continue
            taken, reason = team.attempt(partial(time_once, team, contender, engine, prompts, args.output))
            if reason:
                report.drop(result, "n/a", f"failed while timed ({reason})")
                continue
            for name, seconds in taken.items():
                samples.setdefault(name, []).append(seconds)
        if team.slowest([float(late())])[0]:
            break
    for _, engine, result, samples in ready:
        if result["status"] != "ok":
            continue
        medians = team.slowest([statistics.median(taken) for taken in samples.values()])
        result.update({f"{name}_ms": 1e3 * value for name, value in zip(samples, medians, strict=True)})
        best = min((result[key] for key in ("step_graph_ms", "step_eager_ms") if key in result), default=None)
        result["tokens_per_s"] = best and 1e3 * batch / best
        if not same_everywhere(team, engine):
            report.drop(result, "WRONG", "ranks made different tokens")
    if args.profile:
        for contender, engine, _, _ in ready:
            profile(team, contender, engine, prompts)
    row["results"].sort(key=lambda result: args.contenders.index(result["key"]))
    return row


def find_truth(
    team: Team, base, tokens: torch.Tensor, length: int, convert: truth.Convert = truth.as_it_is
) -> tuple[dict, float]:
    """Return the true logits of the row's first prompts, and the seconds that they took."""
    batch, prompt = len(tokens), tokens.shape[1] - 1
    compared, began = truth.rows_compared(batch, prompt), time.monotonic()

    def find() -> dict[str, torch.Tensor]:
        base.prepare()
        return truth.true_logits(base.model, tokens[:compared], length, convert)

    expected, reason = team.attempt(find)
    if reason or expected is None:
        raise RuntimeError(f"batch {batch}, prompt {prompt}: no true logits to compare with: {reason}")
    if team.cuda:
        torch.cuda.empty_cache()
    return expected, team.slowest([time.monotonic() - began])[0]


def profile(team: Team, contender, engine, prompts: torch.Tensor, steps: int = 4) -> None:
    """Print rank 0's kernels by the time they take, of the prompts and of some steps."""
    kinds = torch.profiler.ProfilerActivity
    contender.prepare()
    for title, work in (
        ("prompts", lambda: engine.accept(engine.read(prompts))),
        (f"{steps} steps", lambda: engine.decode(steps)),
    ):
        if title == "prompts":
            engine.reset()
        team.barrier()
        with torch.profiler.profile(activities=[kinds.CUDA if team.cuda else kinds.CPU]) as taken:
            work()
            team.synchronize()
        order = "self_device_time_total" if team.cuda else "self_cpu_time_total"
        table = taken.key_averages().table(sort_by=order, row_limit=25, max_name_column_width=70)
        team.say(f"{contender.name}, {title} of {tuple(prompts.shape)}\n{table}")


def keeps_prompts(team: Team, engine) -> bool:
    """Return whether every rank has captured the prompts: one may have compiled again instead."""
    return team.slowest([-float(len(engine.prompts))])[0] < 0


def check(team: Team, engine, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Compare logits of the prompts (`tokens` without the last), and of a step on the last, eager and replayed."""
    prompts, last = tokens[:, :-1].contiguous(), tokens[:, -1]
    logits = {}
    for kind in ("eager", "graph") if engine.graphs else ("eager",):
        engine.reset()
        read = engine.prefill(prompts).float()  # the second time it is captured, if at all
        if kind == "eager" or keeps_prompts(team, engine):
            logits[f"prompt, {kind}"] = read
        engine.accept(torch.nn.functional.one_hot(last, read.shape[1]).to(read.dtype))
        if kind == "eager":
            logits["step, eager"] = engine.step().float()
            engine.decode(2)  # captures, and replays once
        else:
            engine.decode(1)
            logits["step, graph"] = engine.logits.float()
    return logits


def time_once(team: Team, contender, engine, prompts: torch.Tensor, output: int) -> dict[str, float]:
    """Return seconds to the first token, and of one step, replayed and eager.

    A GPU that has computed for a while is slower than one that begins, by up to a tenth where it is at its power limit.
    So each kind of first token is timed after others of its kind.
    """
    contender.prepare()
    kinds = [("first_eager", engine.read)] + ([("first_graph", engine.prefill)] if keeps_prompts(team, engine) else [])
    taken = {}
    for name, read in kinds:

        def first(read=read) -> float:
            engine.reset()
            return clock(team, lambda: engine.accept(read(prompts)))

        once = team.slowest([first()])[0]
        for _ in range(min(MOST_WARM, int(WARM_S / once))):
            first()
        taken[name] = first()
    if engine.graphs:
        taken["step_graph"] = clock(team, lambda: engine.decode(output - 1)) / (output - 1)
    steps = EAGER_STEPS if engine.graphs else output - 1
    engine.step()

    def step() -> None:  # whose logits are dropped at once, as a server does
        for _ in range(steps):
            engine.step()

    taken["step_eager"] = clock(team, step) / steps
    return taken


def clock(team: Team, work: Callable[[], object]) -> float:
    """Return seconds until the device has done `work`, begun by all ranks together."""
    team.barrier()
    team.synchronize()
    start = time.perf_counter()
    work()
    team.synchronize()
    return time.perf_counter() - start


def same_everywhere(team: Team, engine) -> bool:
    """Return whether all ranks made the same tokens."""
    tokens = engine.output.double()
    places = torch.arange(1, tokens.numel() + 1, device=tokens.device).view_as(tokens)
    digest = ((tokens * places) % 65521).sum().item()
    highest, lowest = team.slowest([digest, -digest])
    return highest == -lowest


def allocated(team: Team, peak: bool = False) -> int:
    if not team.cuda:
        return 0
    if peak:
        return torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def measure_vllm(args: argparse.Namespace) -> dict[str, dict]:
    """Return what vLLM takes, by contender, if requested: measured before the ranks start, for it needs all GPUs."""
    keys = [key for key in engines.APART if key in args.contenders]
    if not keys:
        return {}
    config = whole_models.config_for_others(args.model, args.layers)
    results = vllm_engine.measure_apart(args, rows_of(args), config, keys)
    return dict(zip(keys, results, strict=True))


def main() -> None:
    args = parse()
    args.vllm = measure_vllm(args)
    sys.exit(launch(run, args, limit_s=args.time_limit + 150))


if __name__ == "__main__":
    main()
