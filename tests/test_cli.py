"""`iris-tp`: each subcommand as a user runs it, and what `doctor` says of machines that lack something."""

import argparse
import contextlib
import io
import os
from pathlib import Path
import re
import subprocess
import sys

from iris import agreement, requirements
from iris.errors import PlatformError
from iris.launch import graphs
from iris.memory.allocators import ALLOCATORS
from iris_ops.ops import Ops
from iris_ops.planning.machine import machine_named
from iris_ops.planning.moe_problem import DOWN_ALL_REDUCE, GATE_UP, MOE_OPS, moe_problem_asked
from iris_ops.planning.moe_ways import WAYS, moe_plan
from iris_ops.planning.plan import plan
from iris_ops.problem import problem_asked
from iris_tp import cli, doctor
from iris_tp.bench import command
from iris_tp.bench.rows import CALLS
from iris_tp.bench.team import launch
import pytest
import torch

from tests.processes import ROOT, python_path, run_fresh


def run(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = python_path()
    return subprocess.run(
        [sys.executable, "-m", "iris_tp", *arguments],
        cwd=folder, env=env, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def test_the_package_installs_the_command() -> None:
    assert '[project.scripts]\niris-tp = "iris_tp.cli:main"' in (ROOT / "pyproject.toml").read_text()
    assert callable(cli.main)


# --- plan ------------------------------------------------------------------------------------------------------------


def test_plan_explains_without_gpu_or_ranks() -> None:
    result = run("plan", "matmul_all_reduce", "2048", "8192", "2048", "--ranks", "4", "--gpu", "h200")
    assert result.returncode == 0, result.stderr
    problem = problem_asked("matmul_all_reduce", 2048, 8192, 2048, 4, torch.bfloat16)
    chosen = plan(problem, machine_named("NVIDIA H200", 132))
    assert result.stdout == f"4 ranks, NVIDIA H200\n{chosen.explain()}\n{chosen}\n"
    assert "chosen" in result.stdout


def test_plan_takes_forms_types_and_machines(capsys: pytest.CaptureFixture) -> None:
    for gpu in cli._GPUS:
        options = ("--form", "k", "--dtype", "float16", "--world", "8", "--gpu", gpu)
        assert cli.main(["plan", "all_gather_matmul", "16", "4096", "1024", *options]) == 0
        assert "all_gather_matmul k M=16 N=4096 K=1024 torch.float16" in capsys.readouterr().out


@pytest.mark.parametrize(
    "rows, way", [(16, "fp8.lamport_stream"), (17, "one_shot, 4 warps, rows rounded to eight bits")]
)
def test_plan_knows_weights_in_eight_bits(rows: int, way: str, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["plan", "matmul_all_reduce", str(rows), "4096", "1024", "--gpu", "h200", "--fp8"]) == 0
    said = capsys.readouterr().out
    assert "torch.bfloat16, B in eight bits on NVIDIA H200" in said and way in said.partition("chosen")[2]
    assert cli.main(["plan", "all_gather_matmul", str(rows), "4096", "1000", "--gpu", "h200", "--fp8"]) == 0
    assert "B is converted in each call: by rows, K and N multiples of 16" in capsys.readouterr().out


def test_plan_has_the_best_of_one_algorithm(capsys: pytest.CaptureFixture) -> None:
    asked = "plan", "matmul_all_reduce", "512", "8192", "2048", "--ranks", "2", "--gpu", "h200"
    assert cli.main([*asked, "--algorithm", "sequential"]) == 0
    assert "chosen with_torch.sequential" in capsys.readouterr().out


_MIXTURE = ("--experts", "128", "--top-k", "8")


@pytest.mark.parametrize("op", MOE_OPS)
@pytest.mark.parametrize("tokens", [4, 4096])
def test_plan_explains_mixtures(op: str, tokens: int, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["plan", op, str(tokens), "2048", "384", *_MIXTURE, "--ranks", "2", "--gpu", "h100"]) == 0
    said = capsys.readouterr().out
    problem = moe_problem_asked(op, tokens, 2048, 384, 128, 8, 2, torch.bfloat16)
    machine = machine_named("NVIDIA H100", 132)
    chosen = moe_plan(problem, machine)
    assert said == f"2 ranks, NVIDIA H100\n{chosen.explain()}\n{chosen}\n"
    assert f"{op} T={tokens} k=8 E=128 N=2048 K=384 torch.bfloat16 on NVIDIA H100\n" in said
    assert f"together {chosen.prediction.total_us:9.1f} us" in said and f"chosen {chosen.kernel} " in said
    for way in (way for way in WAYS if op in way.ops):  # each is weighed, or left out for a reason
        reason = way.supports(problem, machine)
        rows = [line for line in said.splitlines() if line.startswith(way.kernel) and f" {way.algorithm} " in line]
        assert bool(rows) == (reason is None)
        assert (f"rejected {way.kernel} {way.algorithm}: {reason}" in said) == (reason is not None)
    alone = ["plan", op, str(tokens), "2048", "384", *_MIXTURE, "--gpu", "h100", "--algorithm", "sequential"]
    refused = op == GATE_UP and tokens == 4
    assert cli.main(alone) == (2 if refused else 0)
    said = capsys.readouterr()
    assert ("algorithm is 'sequential'; expected one that serves" in said.err) == refused
    assert all(line.endswith(" sequential") for line in said.out.splitlines() if line.startswith("chosen"))


def test_plan_of_a_mixture_says_what_equal_bits_cost(capsys: pytest.CaptureFixture) -> None:
    asked = ["plan", DOWN_ALL_REDUCE, "4", "2048", "384", *_MIXTURE, "--gpu", "h100"]
    assert cli.main([*asked, "--invariant", "batch"]) == 0
    said = capsys.readouterr().out
    left = [float(each) for each in re.findall(r"left out moe\.\S+ \S+ \w+, ([\d.]+) us: its tile", said)]
    taken = [float(each) for each in re.findall(r"together +([\d.]+) us", said)]
    cost = re.search(r"among any number of tokens cost ([\d.]+) us", said)
    assert left and cost is not None and abs(max(0.0, taken[0] - min(left)) - float(cost[1])) < 0.11
    assert cli.main(asked) == 0
    assert "left out" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, error",
    [
        ((GATE_UP, "1", "8", "8"), f"experts is None for {GATE_UP}; expected an integer from 1 to 4096"),
        ((GATE_UP, "1", "8", "8", "--experts", "0"), "experts is 0"),
        ((GATE_UP, "1", "8", "8", *_MIXTURE, "--top-k", "65"), "top_k is 65 for moe_gate_up; expected an integer from"),
        ((GATE_UP, "-1", "8", "8", *_MIXTURE), "M is -1; expected an integer"),
        ((GATE_UP, "1", "8", "8", *_MIXTURE, "--fp8"), "fp8 is True for moe_gate_up; expected False"),
        ((GATE_UP, "1", "8", "8", *_MIXTURE, "--form", "rows"), "form is 'rows' for moe_gate_up; expected none"),
        ((DOWN_ALL_REDUCE, "1", "8", "8", *_MIXTURE, "--world", "0"), "world_size is 0"),
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
        (("matmul_all_reduce", "-1", "2", "3"), "M is -1; expected an integer"),
        (("matmul_all_reduce", "1", "2", "3", "--form", "rows"), "form is 'rows' for matmul_all_reduce; expected none"),
        (("matmul_all_reduce", "1", "2", "3", "--world", "0"), "world_size is 0"),
        (("matmul_all_reduce", "1", "2", "x"), "invalid int value: 'x'"),
        (("matmul_all_reduce", "1", "2", "3", "4"), "unrecognized arguments: 4"),
        (("matmul_all_reduce", "1", "2", "3", "--gpu", "abacus"), "invalid choice: 'abacus'"),
    ],
)
def test_a_wrong_question_is_refused(arguments: tuple[str, ...], error: str, capsys: pytest.CaptureFixture) -> None:
    try:
        code = cli.main(["plan", *arguments])
    except SystemExit as end:  # argparse's way
        code = end.code
    assert code == 2
    assert error in capsys.readouterr().err


# --- demo and bench --------------------------------------------------------------------------------------------------


def test_forwards_with_all_arguments() -> None:
    result = run("demo", "--help")
    assert result.returncode == 0 and "--ranks" in result.stdout
    refused = run("bench", "ops", "--no-such-option", "7")
    assert refused.returncode == 2 and "--no-such-option 7" in refused.stderr


@pytest.mark.slow
def test_paths_are_those_of_where_the_user_stands(tmp_path: Path) -> None:
    wanted = ("--device", "cpu", "--quick", "--shapes", "tiny", "--ops", "ar", "--only", "ours", "--out", "results")
    result = run("bench", "ops", *wanted, folder=tmp_path)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "results" / "ops_cpu_x2.json").exists()


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_bench_says_which_ops_and_benchmarks_there_are(option: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", option])
    said = capsys.readouterr().out
    assert end.value.code == 0 and all(name in said for name in (*CALLS.values(), *command.IN_CHECKOUT))


def test_every_benchmark_named_is_there() -> None:
    assert all((ROOT / "benchmarks" / f"{name}.py").exists() for name in command.IN_CHECKOUT)


@pytest.mark.parametrize(
    "arguments, error",
    [
        (("matmul",), "invalid choice: 'matmul'"),
        (("matmul_all_reduce", "16"), "expected M, N and K, or none of them"),
        (("matmul_all_reduce", "16", "0", "8"), "M, N, K are 16, 0, 8; expected sizes from 1 on"),
        (("matmul_all_reduce", "--ranks", "0"), "--ranks is 0; expected 1 or more"),
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


@pytest.mark.parametrize("arguments", [("bench", "ops")])
def test_without_a_checkout_it_says_so(arguments, tmp_path: Path, monkeypatch, capsys) -> None:
    class Spec:
        origin = str(tmp_path / "iris" / "__init__.py")

    monkeypatch.setattr(cli, "find_spec", lambda name: Spec)
    monkeypatch.setattr(cli, "_version", lambda: "0")
    assert cli.main([*arguments, "--ranks", "2"]) == 2
    assert "part of the source checkout" in capsys.readouterr().err


# --- doctor ----------------------------------------------------------------------------------------------------------


def test_doctor_examines_this_machine() -> None:
    result = run("doctor")
    assert result.returncode == (1 if re.search(r"^ *FIX ", result.stdout, re.M) else 0), result.stderr
    for name in ("python", "torch", "triton", "numpy", "safetensors"):
        assert re.search(rf"^ *ok  {name} \d", result.stdout, re.M), result.stdout
    assert "GPU" in result.stdout and "/dev/shm" in result.stdout


def test_doctor_wants_the_versions_of_the_package() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert f'requires-python = ">={doctor._dotted(doctor.PYTHON)}"' in text
    for name, (least, below) in {**doctor.REQUIRED, **doctor.OPTIONAL, **doctor.VMEM}.items():
        found = re.search(rf'"{name}>=([\d.]+)(?:,<([\d.]+))?"', text)
        assert found, name
        assert found.groups() == (doctor._dotted(least), below and doctor._dotted(below))
    assert doctor._ALLOCATORS == ALLOCATORS
    assert doctor.REQUIRED["triton"] == (requirements.LEAST, requirements.BELOW)


@pytest.mark.parametrize(
    "given, level", [("3.6.0", "ok"), ("3.5.1", "FIX"), ("3.10.0", "FIX"), ("3.6.0+git1", "ok"), (None, "FIX")]
)
def test_doctor_compares_versions(given: str | None, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if given is None or name != "triton":
            raise doctor.importlib.metadata.PackageNotFoundError(name)
        return given

    monkeypatch.setattr(doctor.importlib.metadata, "version", version)
    finding = doctor._version("triton", (3, 6), (3, 10), True)
    assert finding.level == level
    assert level == "ok" or "pip install 'triton>=3.6,<3.10'" in finding.remedy


def installed(monkeypatch: pytest.MonkeyPatch, requires: str, **packages: str) -> None:
    def version(name: str) -> str:
        if name.replace("-", "_") not in packages:
            raise doctor.importlib.metadata.PackageNotFoundError(name)
        return packages[name.replace("-", "_")]

    monkeypatch.setattr(doctor.importlib.metadata, "version", version)
    requirements = ["filelock", "triton>=9; extra == 'all'", *filter(None, [requires])]
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda name: requirements)


LINUX = '; platform_system == "Linux"'


@pytest.mark.parametrize(
    "torch, requires, triton, level, remedy",
    [
        ("2.11.0", f"triton==3.6.0{LINUX}", "3.6.0", None, ""),
        ("2.11.0", f"triton==3.6.0{LINUX}", "3.9.0", "FIX", "pip install 'triton==3.6.0'"),
        ("2.14.1", f'triton~=3.8.0{LINUX} and python_version < "3.15"', "3.8.2", None, ""),
        ("2.14.1", f'triton~=3.8.0{LINUX} and python_version < "3.15"', "3.6.0", "FIX", "pip install 'triton~=3.8.0'"),
        ("2.14.1", "triton (>=3.8,<3.9)", "3.9.0", "FIX", "pip install 'triton>=3.8,<3.9'"),
        ("2.9.1", f"triton==3.5.1{LINUX}", "3.6.0", "FIX", "pip install 'torch>=2.10,<2.16'"),
        ("2.16.0", f"triton~=3.10.0{LINUX}", "3.9.0", "FIX", "pip install 'torch>=2.10,<2.16'"),
        ("2.13.0+cpu", "", "3.7.1", None, ""),
        ("2.13.0+cpu", "", "3.6.0", "note", "pip install 'triton==3.7.*'  (to test what GPUs run)"),
        ("2.16.0+cpu", "", "3.9.0", None, ""),
    ],
)
def test_doctor_knows_which_triton_a_torch_requires(
    torch: str, requires: str, triton: str, level: str | None, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, requires, torch=torch, triton=triton)
    findings = list(doctor.pair())
    assert [(finding.level, finding.remedy) for finding in findings] == ([(level, remedy)] if level else [])
    assert all(f"torch {torch}" in finding.what and triton in finding.what for finding in findings)


def test_doctor_finds_the_triton_of_rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = f"pytorch-triton-rocm==3.6.0{LINUX}"
    installed(monkeypatch, wanted, torch="2.11.0+rocm7.0", pytorch_triton_rocm="3.6.0")
    assert not list(doctor.pair())
    installed(monkeypatch, wanted, torch="2.11.0+rocm7.0", pytorch_triton_rocm="3.7.0")
    assert next(doctor.pair()).remedy == "pip install 'pytorch-triton-rocm==3.6.0'"
    installed(monkeypatch, wanted, torch="2.11.0+rocm7.0")
    assert not list(doctor.pair()), "that there is none is said of the versions"


def test_doctor_sees_another_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = doctor.launcher()
    assert found.level == doctor.OK, found
    from triton.backends.nvidia import driver

    monkeypatch.setattr(driver, "CudaLauncher", type("CudaLauncher", (), {"__init__": lambda self: None}))
    (found,) = doctor.launcher()
    assert found.level == doctor.NOTE and "launch_pdl" in found.what and "50 us" in found.what


def test_doctor_reads_variables(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    for name in [name for name in os.environ if name.startswith("IRIS_")]:
        monkeypatch.delenv(name)
    assert not list(doctor.environment())
    monkeypatch.setenv("IRIS_ALLOCATOR", "vmem")
    monkeypatch.setenv("IRIS_OP_GRAPHS", "0")
    monkeypatch.setenv("IRIS_TIMOUT", "5")
    monkeypatch.setenv("IRIS_DEBUG", "1")
    findings = list(doctor.environment())
    assert [finding.level for finding in findings] == ["ok", "ok", "ok", "note"]
    assert doctor.show(findings) == 0
    monkeypatch.setenv("IRIS_DEBUG", "yes")
    monkeypatch.setenv("IRIS_OP_GRAPHS", "no")
    assert [finding.remedy for finding in doctor.environment() if finding.level == "FIX"] == ["expected 0 or 1"] * 2
    monkeypatch.delenv("IRIS_OP_GRAPHS")
    monkeypatch.delenv("IRIS_DEBUG")
    monkeypatch.setenv("IRIS_TIMEOUT", "-5")
    monkeypatch.setenv("IRIS_ALLOCATOR", "malloc")
    findings = list(doctor.environment())
    assert [finding.level for finding in findings] == ["FIX", "FIX", "note"]
    assert doctor.show(findings) == 1
    assert "expected seconds" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "0", "1", "2", "maybe", "True"])
def test_doctor_refuses_what_the_library_refuses(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, reads in (("IRIS_DEBUG", agreement.wanted), ("IRIS_OP_GRAPHS", graphs.wanted)):
        monkeypatch.setenv(name, text)
        (level,) = (finding.level for finding in doctor.environment() if name in finding.what)
        try:
            reads()
        except PlatformError as error:
            assert level == "FIX" and f"{name} is {text!r}; expected" in str(error)
        else:
            assert level == "ok"


@pytest.mark.parametrize("python, level", [((3, 9, 18), "FIX"), ((3, 10, 0), "ok"), ((3, 14, 0), "ok")])
def test_doctor_looks_at_python(python: tuple[int, ...], level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", python)
    finding = next(doctor.versions())
    assert finding.level == level and finding.what.startswith("python ")
    assert level == "ok" or finding.remedy == "install Python 3.10 or newer"


@pytest.mark.parametrize("allocator, lacking", [("torch", "note"), ("vmem", "FIX")])
@pytest.mark.parametrize(
    "given, broken, said",
    [
        (None, "", "cuda-bindings is not installed"),
        ("12.6.0", "", "cuda-bindings is 12.6.0; expected >=12.8"),
        ("12.9.1", "no libcuda", "cuda-bindings 12.9.1 cannot be imported: no libcuda"),
        ("12.9.1", "", None),
    ],
)
def test_doctor_looks_for_the_driver_s_bindings(
    given: str | None, broken: str, said: str | None, allocator: str, lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if given is None:
            raise doctor.importlib.metadata.PackageNotFoundError(name)
        return given

    monkeypatch.setenv("IRIS_ALLOCATOR", allocator)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(doctor.importlib.metadata, "version", version)
    monkeypatch.setattr(doctor, "_broken", lambda module: broken)
    for other in ("versions", "pair", "launcher", "gpus", "peers", "links", "memory", "environment"):
        monkeypatch.setattr(doctor, other, list)
    (finding,) = doctor.examine()
    if said is None:
        assert finding == doctor.Finding("ok", f"cuda-bindings {given}")
    else:
        assert finding.level == lacking and finding.what == said
        assert "cuda-bindings>=12.8'" in finding.remedy and "pip install" in finding.remedy
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not doctor.examine(), "on CPUs nobody needs them"


TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-47\t0
GPU1\tNV18\t X \tSYS\tSYS\t0-47\t0
GPU2\tSYS\tSYS\t X \tSYS\t48-95\t1
NIC0\tPIX\tSYS\tSYS\t X

Legend:
  NV#  = Connection traversing a bonded set of # NVLinks
"""


def test_doctor_reads_the_topology() -> None:
    assert doctor.topology(TOPOLOGY) == {(0, 1): "NV18", (0, 2): "SYS", (1, 2): "SYS"}
    assert doctor.topology("\tGPU0\tCPU Affinity\nGPU0\t X \t0-47\n") == {}
    assert doctor.topology("No devices were found") == {}


def test_doctor_sees_gpus_that_do_not_see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: 2 not in (a, b))
    (finding,) = doctor.peers()
    assert finding.level == "FIX" and finding.what.endswith(": 0 to 2, 1 to 2, 2 to 0, 2 to 1")
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: True)
    assert [finding.level for finding in doctor.peers()] == ["ok"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert "IRIS_SHARE_GPUS=1" in next(doctor.peers()).what
