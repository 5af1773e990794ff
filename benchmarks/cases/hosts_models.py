"""Models over two hosts, for `benchmarks.hosts`: their tokens and steps, and what ranks raise when one is killed."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
import json
import os
import signal
import time
from typing import Any

import iris
from iris.errors import IrisError
from iris_tp.bench.team import Team, describe
import layers
import torch
from torch.distributed.device_mesh import init_device_mesh

LOST_SECONDS = 8
MODEL = dict(vocab_size=4096, hidden_size=1024, intermediate_size=2816, num_hidden_layers=4, num_attention_heads=16,
             num_key_value_heads=8, max_position_embeddings=512)  # fmt: skip
TINY = dict(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=128)  # fmt: skip
STEP = MODEL | dict(
    vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_hidden_layers=8
)
NEW = 12
MIXTURE = dict(vocab_size=4096, hidden_size=1024, intermediate_size=1408, num_hidden_layers=2, num_attention_heads=16,
               num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2)  # fmt: skip
TINY_MIXTURE = MIXTURE | dict(
    vocab_size=128, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=4
)


def mesh_of(team: Team, first: str) -> Any:
    return init_device_mesh(team.device.type, (2, team.world // 2), mesh_dim_names=(first, "tp"))


def heap_bytes(args: argparse.Namespace) -> int:
    return int(args.heap_gib * (1 << 30))


def _model(team: Team, dtype: torch.dtype, sizes: dict[str, int]) -> Any:
    import transformers

    kind = "Mixtral" if "num_local_experts" in sizes else "Llama"
    config = getattr(transformers, f"{kind}Config")(**sizes)
    torch.manual_seed(11)
    with torch.device(team.device):
        return getattr(transformers, f"{kind}ForCausalLM")._from_config(config, dtype=dtype).eval()


def models(team: Team, args: argparse.Namespace) -> dict[str, Any]:
    """Compare tokens with the unsplit model's, by `generate` and engines, and time an engine's steps."""
    torch.backends.cuda.matmul.allow_tf32 = False
    sizes = MODEL if team.cuda else TINY
    prompts = torch.randint(0, sizes["vocab_size"], (2, 9), generator=torch.Generator().manual_seed(5)).to(team.device)
    sampling: dict[str, Any] = dict(max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)

    def unsplit(sizes: dict[str, int]) -> list[list[int]]:
        return _model(team, torch.float32, sizes).generate(prompts % sizes["vocab_size"], **sampling)[:, 9:].tolist()

    mixture = MIXTURE if team.cuda else TINY_MIXTURE
    expected = {"llama": unsplit(sizes), "mixture": unsplit(mixture)}
    result: dict[str, Any] = {"tokens": {}, "ms": {}, "seconds": {}}
    meshes, begin = ("pp", "across"), time.monotonic()

    def has_time(what: str) -> bool:
        seconds = team.slowest([time.monotonic() - begin])[0]
        result["seconds"][what] = seconds
        team.say(f"  [{seconds:3.0f} s] {what}: {result['tokens']} {result['ms']}")
        if seconds > args.models_s:
            result.setdefault("left_out", []).append(what)
        return seconds <= args.models_s

    def compared(mesh_name: str, ways: dict[str, dict[str, Any] | None], kind: str = "llama") -> None:
        """Compare the tokens of `generate`, for None, and of engines with these options."""
        with _context(team, args, mesh_name) as (ctx, given):
            model = _model(team, torch.float32, sizes if kind == "llama" else mixture)
            layers.parallelize(model, ctx, **given)
            for name, options in ways.items():
                if options is None:
                    tokens = model.generate(prompts, **sampling)[:, 9:].tolist()
                else:
                    engine = layers.Engine(model, ctx, 2, 64, **options)
                    tokens = [engine.generate(prompts, NEW) for _ in range(3)][-1]  # the third one replays
                    if engine.graphs:
                        result.setdefault("graphs", {})[f"{mesh_name}, {kind}"] = len(engine.steps)
                label = f"{mesh_name}, {name}" if kind == "llama" else f"{mesh_name}, {kind}, {name}"
                result["tokens"][label] = team.slowest([tokens != expected[kind]])[0] == 0

    ways: dict[str, Any] = {"eager": {"graphs": False}} | ({"graphs": {}} if team.cuda else {})
    for mesh_name, kind in (("pp", "llama"), ("across", "llama"), ("across", "mixture"), ("pp", "mixture")):
        if has_time(f"{mesh_name}, {kind}, tokens"):
            compared(mesh_name, {"generate": None, **ways}, kind)
    for mesh_name in meshes * team.cuda:
        if has_time(f"{mesh_name}, steps"):
            with _context(team, args, mesh_name) as (ctx, given):
                model = _model(team, torch.bfloat16, STEP)
                layers.parallelize(model, ctx, **given)
                for name, options in ways.items():
                    engine = layers.Engine(model, ctx, 1, 512, **options)
                    result["ms"][f"{mesh_name}, {name}"] = _steps(team, engine, prompts[:1])
    for mesh_name in meshes:
        if has_time(f"{mesh_name}, compiled"):
            compared(mesh_name, {"compiled": {"compile": True if team.cuda else "eager"}})
    return result


@contextmanager
def _context(team: Team, args: argparse.Namespace, mesh_name: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    mesh = mesh_of(team, "pp" if mesh_name == "pp" else "hosts")
    across = None if mesh_name == "pp" else mesh["hosts"]
    with iris.iris(heap_bytes(args), group=mesh["tp"], across=across) as ctx:
        yield ctx, {"mesh": mesh} if mesh_name == "pp" else {}


def _steps(team: Team, engine: Any, prompts: torch.Tensor) -> float:
    """Return milliseconds of a decode step of one row, after steps that compile and capture."""
    engine.reset()
    engine.accept(engine.prefill(prompts))
    engine.decode(4)
    team.synchronize()
    team.barrier()
    team.synchronize()
    begin = time.perf_counter()
    engine.decode(32)
    team.synchronize()
    return team.slowest([(time.perf_counter() - begin) / 32 * 1e3])[0]


def lost(team: Team, args: argparse.Namespace, how: str) -> dict[str, Any]:
    """Kill the last rank; write what this one raises, and end without a further exchange."""
    begin = time.monotonic()

    def die() -> None:
        nonlocal begin
        if team.rank == team.world - 1:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()

    outcome: dict[str, Any] = {"rank": team.rank, "host": os.uname().nodename}
    try:
        with _context(team, args, "pp" if how == "stage" else "across") as (ctx, given):
            if how == "stage":
                model = _model(team, torch.float32, TINY)
                layers.parallelize(model, ctx, **given)
                prompts = torch.ones(1, 4, dtype=torch.long, device=team.device)
                sampling: dict[str, Any] = dict(max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)
                model.generate(prompts, **sampling)
                calls: list[int] = []
                model.register_forward_pre_hook(lambda *_: die() if calls.append(0) or len(calls) == 2 else None)
                model.generate(prompts, **sampling)
            elif how == "graph":
                model = _model(team, torch.float32, TINY)
                layers.parallelize(model, ctx, **given)
                engine = layers.Engine(model, ctx, 1, 128)
                prompts = [[1, 2, 3, 4]]
                for _ in range(3):  # which capture the steps, and replay them
                    engine.generate(prompts, 8)
                team.barrier()
                die()
                while True:
                    engine.generate(prompts, 32)
            else:
                A, B = (torch.ones(64, 64, dtype=torch.bfloat16, device=team.device) for _ in range(2))
                out = torch.empty_like(A)
                ctx.ops.matmul_all_reduce(out, A, B)
                ctx.across.settle()
                team.barrier()
                team.synchronize()
                die()
                while True:
                    ctx.ops.matmul_all_reduce(out, A, B)
                    ctx.across.settle()
    except IrisError as error:
        outcome |= {"seconds": time.monotonic() - begin, "error": f"{type(error).__name__}: {error}"}
    except Exception as error:  # not what is expected, which the table shows
        outcome |= {"seconds": time.monotonic() - begin, "error": f"untyped: {describe(error)}"}
    (args.folder / f"lost-{how}-{team.rank}.json").write_text(json.dumps(outcome))
    time.sleep(LOST_SECONDS / 2)  # the others may read this process's store
    os._exit(0)
