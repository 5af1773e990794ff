"""Measure what a weight kept in its stored format costs a model: `python -m benchmarks.kept --ranks 2`.

First small quantised checkpoints are loaded twice, kept and widened, and the logits of both are compared with the
float64 logits of the numbers in the files. Then layers of a 70B model are made in each format: the time of a decode
step from CUDA graphs, the bytes of parameters, and the most memory that a prompt of 2048 tokens takes beside them.
"""

import argparse
import gc
from pathlib import Path
import sys
import tempfile
import time

import iris
from iris_tp.bench.team import Team, launch
import layers
import torch

from benchmarks.measuring import report

WRITTEN = ["fp8_block", "ct_int4_32", "ct_mxfp4"]
MADE = [None, "fp8_all", "fp8_block", "int4", "mxfp4"]
SMALL = {
    "vocab_size": 256, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "initializer_range": 0.05, "pad_token_id": 0,
}  # fmt: skip
TINY = SMALL | {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
}
LARGE = {
    "vocab_size": 1024, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 4,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "pad_token_id": 0,
}  # fmt: skip
ALLOWED = 1.5  # times the error of the widened weights


def loaded(team: Team, ctx: iris.Iris, name: str, folder: Path) -> dict:
    """Return the errors of the logits of a checkpoint in the format `name`, kept and widened."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    from tests.layers import written_formats

    if team.rank == 0:
        torch.manual_seed(1)
        sizes = SMALL if team.cuda else TINY
        written_formats.write(LlamaForCausalLM(LlamaConfig(**sizes)).eval(), folder / name, name)
    ctx.barrier()
    tokens = torch.randint(3, 250, (2, 48 if team.cuda else 8), generator=torch.Generator().manual_seed(2))
    exact = AutoModelForCausalLM.from_pretrained(folder / f"{name}-exact", dtype=torch.float64).eval()(tokens).logits
    row: dict = {"format": name, "errors": {}, "tokens": {}}
    for way, weights in (("kept", None), ("widened", "widened")):
        model = layers.from_pretrained(folder / name, ctx, dtype=torch.bfloat16, weights=weights, verify=True)
        row["errors"][way] = ((model(tokens.to(ctx.device)).logits.double().cpu() - exact).norm() / exact.norm()).item()
        few = model(tokens[:1, :7].to(ctx.device)).logits.double().cpu()
        row["errors"][f"{way}, 7 rows"] = ((few - exact[:1, :7]).norm() / exact[:1, :7].norm()).item()
        engine = layers.Engine(model, ctx, batch_size=2, max_length=96)
        row["tokens"][way] = engine.generate(tokens[:, :16].tolist(), 24 if team.cuda else 2)
        row[f"report {way}"] = model.parallel_report.widened
    pairs = [(a, b) for k, w in zip(*row["tokens"].values(), strict=True) for a, b in zip(k, w, strict=True)]
    row["tokens"] = f"{sum(a == b for a, b in pairs)} of {len(pairs)} alike"
    return row


def created(team: Team, ctx: iris.Iris, weights: str | None) -> dict:
    """Return the time of a step, and bytes, of layers that are made in a format."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes, steps = (LARGE, 40) if team.cuda else (TINY, 2)
    torch.manual_seed(3)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(ctx.device):
        model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    torch.set_default_dtype(default)
    bytes_of_parameters = layers.parallelize(model, ctx, weights=weights).bytes
    row = {"weights": weights or "bf16", "bytes": bytes_of_parameters, "step_us": {}}
    for batch in (1, 8) if team.cuda else (1,):
        engine = layers.Engine(model, ctx, batch_size=batch, max_length=256)
        prompts = [[5, 6, 7, 8]] * batch
        engine.generate(prompts, 4)
        times = []
        for count in (4, 4 + steps):
            team.barrier()
            begin = time.monotonic()
            engine.generate(prompts, count)
            team.synchronize()
            times.append(time.monotonic() - begin)
        row["step_us"][batch] = (times[1] - times[0]) / steps * 1e6
    if team.cuda:
        prompt = torch.randint(3, 1000, (1, 2048), device=ctx.device)
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            team.synchronize()
            begin = time.monotonic()
            model(prompt, use_cache=False)
            team.synchronize()
            row["prompt_ms"] = (time.monotonic() - begin) * 1e3
            row["prompt_bytes"] = torch.cuda.max_memory_allocated() - before
    return row


@torch.no_grad()
def run(team: Team, args: argparse.Namespace) -> None:
    begin, ctx, wrong = time.monotonic(), iris.iris(int(args.heap_gib * 2**30)), []
    rows = []
    with tempfile.TemporaryDirectory() as own:
        folder = Path(ctx.broadcast(own))
        for name in WRITTEN if team.cuda else WRITTEN[1:2]:
            rows.append(loaded(team, ctx, name, folder))
            errors = rows[-1]["errors"]
            for end in ("", ", 7 rows"):
                if not errors[f"kept{end}"] <= ALLOWED * errors[f"widened{end}"]:
                    wrong.append(f"{name}{end}: {errors}")
            team.say(f"{time.monotonic() - begin:5.1f} s {rows[-1]}")
        ctx.barrier()
    for weights in MADE if team.cuda else MADE[-1:]:
        if team.slowest([time.monotonic() - begin])[0] > args.time_limit:
            team.say(f"{weights}: left out for time")
            continue
        rows.append(created(team, ctx, weights))
        team.say(f"{time.monotonic() - begin:5.1f} s {rows[-1]}")
        gc.collect()
        if team.cuda:
            torch.cuda.empty_cache()
    ctx.close()
    if team.rank == 0:
        report.write(report.describe_run(team, args) | {"rows": rows, "wrong": wrong}, args)
    if wrong:
        team.say("WRONG: " + "; ".join(wrong))
        sys.exit(1)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    report.add_arguments(parser, dtype="bfloat16")
    args = parser.parse_args(argv)
    report.settle(args, argv, "kept")
    return launch(run, args, args.time_limit + 60)


if __name__ == "__main__":
    sys.exit(main())
