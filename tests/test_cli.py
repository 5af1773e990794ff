"""`iris-tp`: each subcommand as a user runs it; `test_doctor.py` has `doctor`."""

import argparse
import contextlib
import io
import os
from pathlib import Path
import re
import subprocess
import sys

from iris.machines import machine_named
from iris_ops.ops import Ops
from iris_ops.planning.operations import DOWN_ALL_REDUCE, GATE_UP, MOE_OPS
from iris_ops.planning.plan import WAYS, plan
from iris_ops.problem import Request, requested_problem
from iris_tp import arguments, cli
from iris_tp.bench import command
from iris_tp.bench.rows import CALLS
from iris_tp.bench.team import launch
import pytest
import torch

from tests.processes import ROOT, patient, python_path, run_fresh


def run(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = python_path()
    return subprocess.run(
        [sys.executable, "-m", "iris_tp", *arguments],
        cwd=folder, env=env, capture_output=True, text=True, timeout=patient(120), stdin=subprocess.DEVNULL,
    )  # fmt: skip


def test_the_package_installs_the_command() -> None:
    assert '[project.scripts]\niris-tp = "iris_tp.cli:main"' in (ROOT / "pyproject.toml").read_text()
    assert callable(cli.main)


# --- plan ------------------------------------------------------------------------------------------------------------


def test_plan_explains_without_gpu_or_ranks() -> None:
    result = run("plan", "matmul_all_reduce", "2048", "8192", "2048", "--ranks", "4", "--gpu", "h200")
    assert result.returncode == 0, result.stderr
    problem = requested_problem(Request("matmul_all_reduce", 2048, 8192, 2048, 4, torch.bfloat16))
    chosen = plan(problem, machine_named("NVIDIA H200", 132))
    assert result.stdout == f"4 ranks, NVIDIA H200\n{chosen.explain()}\n"
    assert "\nchosen " in result.stdout and "FusedConfig(" not in result.stdout


def test_a_reader_that_leaves_ends_a_command_quietly() -> None:
    call = f"{sys.executable} -m iris_tp plan matmul_all_reduce 8 8 8 | true; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(
        ["bash", "-c", call], cwd=ROOT, env=os.environ | {"PYTHONPATH": python_path()}, capture_output=True, text=True
    )
    assert (result.returncode, result.stderr) == (141, "")


def test_plan_takes_forms_types_and_machines(capsys: pytest.CaptureFixture) -> None:
    for gpu in arguments.GPUS:
        options = ("--form", "k", "--dtype", "float16", "--world", "8", "--gpu", gpu)
        assert cli.main(["plan", "all_gather_matmul", "16", "4096", "1024", *options]) == 0
        assert "all_gather_matmul k M=16 N=4096 K=1024 torch.float16" in capsys.readouterr().out


@pytest.mark.parametrize(
    "rows, way", [(16, "quantised.lamport_stream"), (17, "one_shot, 4 warps, rows rounded to fp8")]
)
def test_plan_knows_fp8_weights(rows: int, way: str, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["plan", "matmul_all_reduce", str(rows), "4096", "1024", "--gpu", "h200", "--fp8"]) == 0
    printed = capsys.readouterr().out
    assert "torch.bfloat16, B in fp8 on NVIDIA H200" in printed and way in printed.partition("chosen")[2]
    assert cli.main(["plan", "all_gather_matmul", str(rows), "4096", "1000", "--gpu", "h200", "--fp8"]) == 0
    assert "us: only by rows, with K and N multiples of 16, are rows rounded" in capsys.readouterr().out


_MIXTURE = ("--experts", "128", "--top-k", "8")


@pytest.mark.parametrize("op", MOE_OPS)
@pytest.mark.parametrize("tokens", [4, 4096])
def test_plan_explains_mixtures(op: str, tokens: int, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["plan", op, str(tokens), "2048", "384", *_MIXTURE, "--ranks", "2", "--gpu", "h100"]) == 0
    printed = capsys.readouterr().out
    problem = requested_problem(Request(op, tokens, 2048, 384, 2, torch.bfloat16, experts=128, top_k=8))
    machine = machine_named("NVIDIA H100", 132)
    chosen = plan(problem, machine)
    assert printed == f"2 ranks, NVIDIA H100\n{chosen.explain()}\n"
    assert f"{op} T={tokens} k=8 E=128 N=2048 K=384 torch.bfloat16 on NVIDIA H100\n" in printed
    assert f"together {chosen.prediction.total_us:9.1f} us" in printed and f"chosen {chosen.kernel} " in printed
    for way in (way for way in WAYS if op in way.ops):  # each is weighed, or left out for a reason
        reason = way.objection(problem, machine)
        rows = [
            line for line in printed.splitlines() if line.startswith(way.kernel) and f" {way.algorithms[0]} " in line
        ]
        assert bool(rows) == (reason is None)
        assert (f"rejected {way.name}: {reason}" in printed) == (reason is not None)
    alone = ["plan", op, str(tokens), "2048", "384", *_MIXTURE, "--gpu", "h100", "--algorithm", "sequential"]
    refused = op == GATE_UP and tokens == 4
    assert cli.main(alone) == (2 if refused else 0)
    printed = capsys.readouterr()
    assert ("algorithm is 'sequential'; expected one that serves" in printed.err) == refused
    assert all(line.endswith(" sequential") for line in printed.out.splitlines() if line.startswith("chosen"))


def test_plan_of_a_mixture_says_what_equal_bits_cost(capsys: pytest.CaptureFixture) -> None:
    requested = ["plan", DOWN_ALL_REDUCE, "4", "2048", "384", *_MIXTURE, "--gpu", "h100"]
    assert cli.main([*requested, "--invariant", "batch"]) == 0
    printed = capsys.readouterr().out
    taken = [float(each) for each in re.findall(r"together +([\d.]+) us", printed)]
    cost = re.search(r"tiles of one instruction: the same bits at every number of tokens cost ([\d.]+) us", printed)
    free = plan(
        requested_problem(Request(DOWN_ALL_REDUCE, 4, 2048, 384, 2, torch.bfloat16, experts=128, top_k=8)),
        machine_named("NVIDIA H100", 132),
    )
    assert cost is not None and abs(max(0.0, taken[0] - free.prediction.total_us) - float(cost[1])) < 0.11
    assert cli.main(requested) == 0
    assert "the same bits" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, error",
    [
        ((GATE_UP, "1", "8", "8"), f"experts is None for {GATE_UP}; expected an integer from 1 to 4096"),
        ((GATE_UP, "1", "8", "8", "--experts", "0"), "experts is 0"),
        ((GATE_UP, "1", "8", "8", *_MIXTURE, "--top-k", "65"), "top_k is 65 for moe_gate_up; expected an integer from"),
        ((GATE_UP, "1", "8", "8", "--experts", "4", "--top-k", "5"), "top_k is 5 for moe_gate_up; expected at most 4"),
        ((GATE_UP, "-1", "8", "8", *_MIXTURE), "M is -1; expected an integer from 1 to 2147483647"),
        ((GATE_UP, "0", "8", "8", *_MIXTURE), "M is 0; expected an integer from 1"),
        ((GATE_UP, "1", "8", "8", *_MIXTURE, "--fp8", "--form", "rows"), "form is 'rows' for moe_gate_up, and fp8"),
        (
            (GATE_UP, "1", "8", "8", *_MIXTURE, "--form", "cols"),
            "form is 'cols' for moe_gate_up; expected none, or 'rows'",
        ),
        ((DOWN_ALL_REDUCE, "1", "8", "8", *_MIXTURE, "--world", "0"), "--world is 0"),
        (
            ("matmul_all_reduce", "1", "8", "8", "--experts", "4"),
            "experts is 4 for matmul_all_reduce; expected none, or one of moe_gate_up, moe_down_all_reduce, moe_down_",
        ),
        (("matmul_all_reduce", "1", "8", "8", "--top-k", "4"), "top_k is 4 for matmul_all_reduce; expected none"),
        (
            ("matmul_all_reduce", "1", "8", "8", "--algorithm", "copy_gather"),
            "algorithm is 'copy_gather'; expected one ",
        ),
        (
            ("matmul_all_gather", "1", "2", "3", "--fp8"),
            "fp8 is True for matmul_all_gather; expected False, or one of matmul_all_reduce, all_gather_matmul, ",
        ),
        (("matmul", "1", "2", "3"), "op is 'matmul'; expected one of matmul_all_reduce"),
        (("matmul_all_reduce", "-1", "2", "3"), "M is -1; expected an integer from 1"),
        (("matmul_all_reduce", "0", "2", "3"), "M is 0; expected an integer from 1"),
        (("matmul_all_reduce", "1", "0", "3"), "N is 0; expected an integer from 1"),
        (("matmul_all_reduce", "1", "2", "0"), "K is 0; expected an integer from 1"),
        (("matmul_all_reduce", "1", "2", "1e3"), "K is '1e3'; expected an integer from 1"),
        (("matmul_all_reduce", "2147483648", "2", "3"), "M is 2147483648; expected an integer from 1 to 2147483647"),
        (("matmul_all_reduce", "1", "2", "3", "--ranks", "64"), "--world is 64; expected an integer from 1 to 16"),
        (("matmul_all_reduce", "1", "2", "3", "--form", "rows"), "form is 'rows' for matmul_all_reduce; expected none"),
        (("matmul_all_reduce", "1", "2", "3", "--world", "0"), "--world is 0; expected an integer from 1 to 16"),
        (("matmul_all_reduce", "1", "2", "x"), "K is 'x'; expected an integer from 1"),
        (("matmul_all_reduce", "1", "2", "3", "4"), "unrecognized arguments: 4"),
        (("matmul_all_reduce", "1", "2", "3", "--gpu", "abacus"), "invalid choice: 'abacus'"),
        (("--html", "page.html", "--ranks", "2"), "--html takes no op, no sizes and no other option"),
        (("--html", "page.html", "--fp8"), "--html takes no op, no sizes and no other option"),
    ],
)
def test_a_wrong_question_is_refused(arguments: tuple[str, ...], error: str, capsys: pytest.CaptureFixture) -> None:
    try:
        code = cli.main(["plan", *arguments])
    except SystemExit as end:  # argparse's way
        code = end.code
    assert code == 2
    printed = capsys.readouterr()
    assert (
        error in printed.err
        and printed.err.startswith("iris-tp plan: ")
        and printed.err.count("\n") == 1
        and not printed.out
    )


def test_gpus_that_plan_names_are_machines_of_the_planner() -> None:
    """With their own rates, not an H200's scaled."""
    assert {"a100", "b200", "h20", "mi300x", "mi325x"} < set(arguments.GPUS)
    for gpu, (name, programs) in arguments.GPUS.items():
        machine = machine_named(name, programs)
        assert (machine.name, machine.num_programs) == (name, programs)
        assert "scaled" not in machine.source and "measured" in machine.source or gpu in ("h100", "interpreter")
    assert "scaled" in machine_named("some other GPU", 66).source


def test_plan_says_that_rates_are_of_a_data_sheet(capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["plan", "matmul_all_reduce", "16", "4096", "1024", "--gpu", "b200"]) == 0
    printed = capsys.readouterr().out
    assert (
        printed.startswith("4 ranks, NVIDIA B200\n")
        and "\nrates of the data sheet, not measured; iris-tp cal" in printed
    )


# --- without torch ---------------------------------------------------------------------------------------------------

COMMANDS = {
    "generate": ("smollm2", "hm"),
    "demo": (),
    "plan": ("matmul_all_reduce", "8", "8", "8"),
    "bench": (),
    "verify": ("batch",),
}


def without_torch(*arguments: str) -> subprocess.CompletedProcess:
    """Run the command in a Python whose import system hides torch."""
    hidden = (
        "import importlib.util, sys; found = importlib.util.find_spec\n"
        "import importlib.abc\n"
        "class Refuses(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] == 'torch': raise ModuleNotFoundError('No module named torch', name='torch')\n"
        "sys.meta_path.insert(0, Refuses())\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'torch' else found(name, *rest)\n"
        "from iris_tp import cli; sys.exit(cli.main())"
    )
    environment = os.environ | {"PYTHONPATH": python_path()}
    return subprocess.run(
        [sys.executable, "-c", hidden, *arguments], env=environment, capture_output=True, text=True,
        timeout=patient(60), stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_without_torch_a_command_says_so_in_a_line(command: str) -> None:
    result = without_torch(command, *COMMANDS[command])
    expected = f"iris-tp {command}: torch not installed; `iris-tp doctor` lists what to install\n"
    assert (result.returncode, result.stdout, result.stderr) == (2, "", expected)


@pytest.mark.parametrize("command", [(), ("doctor",), *((name,) for name in COMMANDS)])
def test_help_needs_no_torch(command: tuple[str, ...]) -> None:
    result = without_torch(*command, "--help")
    assert result.returncode == 0 and result.stdout.startswith("usage: iris-tp"), result.stderr


def test_an_error_under_torchrun_is_its_last_word(tmp_path: Path) -> None:
    """Two ranks: one line of ours, and torchrun's summary has it again as the cause."""
    env = os.environ | {"PYTHONPATH": python_path()}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "iris_tp", "plan"]
    result = subprocess.run(
        [*torchrun, "matmul_all_reduce", "0", "8", "8"],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=patient(120),
    )  # fmt: skip
    line = "iris-tp plan: M is 0; expected an integer from 1 to 2147483647"
    assert result.returncode != 0 and sum(text.startswith(line) for text in result.stderr.splitlines()) == 1
    last = [text for text in result.stderr.splitlines() if text.strip("=- ")][-1]
    assert line in last, result.stderr


# --- demo and bench --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_bench_says_which_ops_and_benchmarks_there_are(option: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", option])
    printed = capsys.readouterr().out
    assert end.value.code == 0 and all(name in printed for name in (*CALLS.values(), *arguments.IN_CHECKOUT))


def test_every_benchmark_named_is_there() -> None:
    assert all((ROOT / "benchmarks" / f"{name}.py").exists() for name in arguments.IN_CHECKOUT)


@pytest.mark.parametrize(
    "arguments, error",
    [
        (("matmul",), "invalid choice: 'matmul'"),
        (("matmul_all_reduce", "16"), "expected M, N and K, or none of them"),
        (("matmul_all_reduce", "16", "0", "8"), "N is 0; expected an integer from 1"),
        (("matmul_all_reduce", "--ranks", "0"), "--ranks is 0; expected an integer from 1 to 16"),
        (("matmul_all_reduce", "--ranks", "99"), "--ranks is 99; expected an integer from 1 to 16"),
        (("matmul_all_reduce", "--heap-gib", "nan"), "--heap-gib is 'nan'; expected a number above 0"),
    ],
)
def test_bench_refuses_what_it_cannot_measure(arguments: tuple, error: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", *arguments])
    assert end.value.code == 2 and error in capsys.readouterr().err


def test_bench_compares_an_op_with_torch_s() -> None:
    measured = command.parse(
        ["matmul_reduce_scatter", "15", "16", "8", "--device", "cpu", "--dtype", "float32", "--quick"]
    )
    for end in run_fresh(2, measure, measured):
        assert end.exitcode == 0, end.traceback
        printed = end.result.splitlines()
        assert not printed or re.fullmatch(r"matmul_reduce_scatter +[\d.]+ +[\d.]+ +[\d.]+", printed[-1]), printed


def test_bench_says_what_is_wrong() -> None:
    for end in run_fresh(2, measure, command.parse(["matmul_all_reduce", "16", "16", "8", "--device", "cpu"]), True):
        assert end.exitcode == 0, end.traceback
        assert not end.result or "matmul_all_reduce, ours: wrong, inf of the allowed error" in end.result


def measure(rank: int, world: int, args: argparse.Namespace, spoilt: bool = False) -> str:
    if spoilt:
        Ops.matmul_all_reduce = lambda self, out, A, B: None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            assert launch(command.measure, args, limit_s=60) == int(spoilt)
        except SystemExit as end:
            assert spoilt and end.code == 1
    return printed.getvalue()


def test_benchmarks_of_a_checkout_are_listed_and_run_where_there_is_one(tmp_path: Path, monkeypatch, capfd) -> None:
    """With installed packages: in no checkout they are neither, in a checkout both."""
    monkeypatch.setattr(cli, "_package", lambda: tmp_path / "site-packages" / "iris" / "__init__.py")
    monkeypatch.setattr(cli, "_version", lambda: "0")
    for folder, there in ((tmp_path, False), (ROOT, True)):
        monkeypatch.chdir(folder)
        with pytest.raises(SystemExit):
            cli.main(["bench", "--help"])
        assert ("invariance" in capfd.readouterr().out) == there
        assert cli.main(["bench", "ops", "--no-such-option", "7"]) == 2
        assert ("part of the source checkout" in capfd.readouterr().err) == (not there)
