"""Benchmarks refuse what they cannot do, or would pass over, before any rank starts."""

from pathlib import Path
import sys
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # benchmarks are run from the checkout, they are not installed

from iris_tp.bench.team import launch  # noqa: E402

from benchmarks import all_scatter, ccl, fp8, litmus, moe, ops, rma, rooted, stress, tiles, timeline  # noqa: E402


@pytest.mark.parametrize(
    "benchmark, arguments, words",
    [
        (ops, ["--ranks", "0"], "--ranks: invalid number from 1 on value: '0'"),
        (ops, ["--ranks", "-1"], "--ranks: invalid number from 1 on"),
        (ops, ["--time-limit", "-1"], "--time-limit: invalid number from 0.01 on"),
        (ops, ["--modes", "fast"], "--modes: fast; expected some of graph, eager"),
        (ops, ["--device", "cpu", "--rows", "1,2,3"], "no row of 'tiny'"),
        (ops, ["--device", "cpu", "--rows", "1,2"], "--rows: invalid list of sizes M,N,K;M,N,K from 1 on value: '1,2'"),
        (ops, ["--device", "cpu", "--shapes", "nothing"], "no set of rows is called 'nothing'"),
        (ops, ["--device", "cpu", "--vary", "foo=1"], "--vary has 'foo'"),
        (ops, ["--device", "cpu", "--vary", "num_stages=x"], "--vary has 'x'; expected an integer"),
        (ops, ["--device", "cpu", "--only", "ours,nothing"], "--only nothing: expected words in the names of ours, "),
        (ops, ["--device", "cpu", "--modes", "graph"], "--modes graph: expected eager, for CPUs have no CUDA graphs"),
        (ccl, ["--device", "cpu", "--modes", "graph"], "--modes graph: expected eager, for CPUs have no CUDA graphs"),
        (ccl, ["--sizes", "-5"], "--sizes: invalid list of numbers from 1 on"),
        (
            rooted,
            ["--ops", "all_reduce"],
            "--ops: all_reduce; expected some of broadcast, gather, scatter, reduce, ",
        ),
        (rooted, ["--device", "cpu", "--ranks", "1"], "--ranks 1: expected 2 or more"),
        (tiles, ["--blocks", "64,64"], "--blocks: invalid list of six numbers value: '64,64'"),
        (rma, ["--dtype", "float16"], "unrecognized arguments: --dtype float16"),
        (litmus, ["--dtype", "float16"], "unrecognized arguments: --dtype float16"),
        (fp8, ["--dtype", "float16"], "unrecognized arguments: --dtype float16"),
        (moe, ["--shapes", "switch"], "--shapes: switch; expected some of qwen3-30b-a3b, mixtral-8x7b"),
        (moe, ["--tokens", "0"], "--tokens: invalid list of numbers from 1 on"),
        (all_scatter, ["--rows", "1"], "--rows: invalid list of sizes M,N,K;M,N,K from 1 on value: '1'"),
        (all_scatter, ["--rows", "0,0,0"], "--rows: invalid list of sizes M,N,K;M,N,K from 1 on"),
        (all_scatter, ["--device", "cpu", "--store-warp"], "--store-warp on cpu: expected NVIDIA Hopper GPUs"),
        (timeline, ["--rows", "1"], "--rows: invalid list of sizes M,N,K;M,N,K from 1 on value: '1'"),
        (timeline, ["--rows", "0,32,32"], "--rows: invalid list of sizes M,N,K;M,N,K from 1 on"),
        (timeline, ["--op", "nothing"], "--op: nothing; expected some of ar, rs, ag, ga"),
        (timeline, ["--max-events", "0"], "--max-events: invalid number from 1 to 268435456 value: '0'"),
        (timeline, ["--max-events", "268435457"], "--max-events: invalid number from 1 to 268435456"),
        (stress, ["--calls", "-1"], "--calls: invalid number from 0 on value: '-1'"),
        (stress, ["--replays", "-1"], "--replays: invalid number from 0 on"),
        (stress, ["--device", "cpu", "--calls", "0", "--replays", "0"], "--calls and --replays are 0"),
        (stress, ["--graph-calls", "0"], "--graph-calls: invalid number from 1 on"),
        (stress, ["--delay-every", "0"], "--delay-every: invalid number from 1 on"),
        (stress, ["--device", "cpu", "--shapes", "nothing"], "no set of rows is called 'nothing'"),
        (stress, ["--device", "cpu", "--shapes", "given"], "no row of 'given'"),
        (stress, ["--device", "cpu", "--shapes", "decode", "--ranks", "7"], "7 ranks do not divide the columns of"),
    ],
)
def test_what_cannot_be_asked_is_refused(benchmark, arguments, words, capsys):
    with pytest.raises(SystemExit) as end:
        getattr(benchmark, "parse", benchmark.main)(arguments)
    assert end.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused(capsys):
    with pytest.raises(SystemExit) as end:
        ops.parse(["--device", "cuda"])
    assert end.value.code == 2 and "--device: cuda; expected cpu, for torch finds no GPU" in capsys.readouterr().err


def test_more_ranks_than_gpus_are_refused(monkeypatch, capsys):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    args = SimpleNamespace(device="cuda", ranks=3)
    assert launch(pytest.fail, args, limit_s=1) == 2
    assert "--ranks 3: expected at most 2, a GPU each" in capsys.readouterr().err
