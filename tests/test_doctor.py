"""`iris-tp doctor`: its report on this machine, and on machines that lack something."""

import argparse
import os
import re
import sys

from iris import agreement
from iris.errors import PlatformError
from iris.launch import graphs
from iris_tp import cli, doctor
import pytest
import torch

from tests.test_cli import run


@pytest.mark.parametrize("apart", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_doctor_examines_this_machine(apart: bool, capsys: pytest.CaptureFixture) -> None:
    """Called here, and as a user runs it."""
    if apart:
        result = run("doctor")
        code, message = result.returncode, result.stdout
    else:
        code, message = cli.main(["doctor"]), capsys.readouterr().out
    assert code == (1 if re.search(r"^ *FIX ", message, re.M) else 0), message
    for name in ("python", "torch", "triton", "numpy", "safetensors"):
        assert re.search(rf"^ *ok  {name} \d", message, re.M), message
    assert "GPU" in message and ("/dev/shm" in message) == bool(doctor._device_files())


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
        ("2.13.0+cpu", "", "3.6.0", "ok", ""),
        ("2.14.1+cpu", "", "3.9.0", "ok", ""),  # what pip installs beside a CPU torch on Python 3.10
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


@pytest.mark.parametrize("device_files, level", [([], None), (["/dev/nvidiactl"], "FIX")])
def test_a_container_s_small_shared_memory_matters_on_gpus_only(
    device_files: list[str], level: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Docker gives 64 MiB, which NCCL finds too little and ranks on CPUs do not use."""
    monkeypatch.setattr(doctor, "_device_files", lambda: device_files)
    monkeypatch.setattr(doctor.os.path, "isdir", lambda path: True)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: argparse.Namespace(total=64 << 20))
    levels = [finding.level for finding in doctor.memory() if "/dev/shm" in finding.what]
    assert levels == ([level] if level else [])


def test_nothing_is_to_fix_after_a_clean_install_for_cpus(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """On Python 3.10: `pip install torch --index-url .../cpu`, then the package without extras, in a container."""
    installed(monkeypatch, "", torch="2.14.1+cpu", triton="3.9.0", numpy="2.2.6", safetensors="0.6.2")
    monkeypatch.setattr(doctor, "_device_files", list)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in [name for name in os.environ if name.startswith("IRIS_")]:
        monkeypatch.delenv(name)
    assert doctor.show(doctor.examine()) == 0
    message = capsys.readouterr().out
    notes = [line for line in message.splitlines() if line.startswith("note")]
    assert len(notes) == 3 and all(re.search("transformers|accelerate|no GPU", line) for line in notes), message


def test_doctor_finds_the_triton_of_rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = f"pytorch-triton-rocm==3.6.0{LINUX}"
    installed(monkeypatch, expected, torch="2.11.0+rocm7.0", pytorch_triton_rocm="3.6.0")
    assert not list(doctor.pair())
    installed(monkeypatch, expected, torch="2.11.0+rocm7.0", pytorch_triton_rocm="3.7.0")
    assert next(doctor.pair()).remedy == "pip install 'pytorch-triton-rocm==3.6.0'"
    installed(monkeypatch, expected, torch="2.11.0+rocm7.0")
    assert not list(doctor.pair()), "the finding about versions reports that there is none"


def test_doctor_sees_another_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    (actual,) = doctor.launcher()
    assert actual.level == doctor.OK, actual
    from triton.backends.nvidia import driver

    monkeypatch.setattr(driver, "CudaLauncher", type("CudaLauncher", (), {"__init__": lambda self: None}))
    (actual,) = doctor.launcher()
    assert actual.level == doctor.NOTE and "launch_pdl" in actual.what and "50 us" in actual.what


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
    for name, reads in (("IRIS_DEBUG", agreement.enabled), ("IRIS_OP_GRAPHS", graphs.enabled)):
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
    "given, broken, message",
    [
        (None, "", "cuda-bindings is not installed"),
        ("12.6.0", "", "cuda-bindings is 12.6.0; expected >=12.8"),
        ("12.9.1", "no libcuda", "cuda-bindings 12.9.1 cannot be imported: no libcuda"),
        ("12.9.1", "", None),
    ],
)
def test_doctor_looks_for_the_driver_s_bindings(
    given: str | None, broken: str, message: str | None, allocator: str, lacking: str, monkeypatch: pytest.MonkeyPatch
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
    for other in ("versions", "namesake", "pair", "launcher", "gpus", "peers", "links", "memory", "environment"):
        monkeypatch.setattr(doctor, other, list)
    (finding,) = doctor.examine()
    if message is None:
        assert finding == doctor.Finding("ok", f"cuda-bindings {given}")
    else:
        assert finding.level == lacking and finding.what == message
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
