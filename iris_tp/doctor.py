"""`iris-tp doctor`: check what the library needs of a machine, and give a remedy for what is missing.

Each check is a function that yields findings. It changes nothing, starts no rank, and takes no GPU memory beyond that
of a query of properties. Without a GPU that is a note, not a fault: the kernels then run in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
import importlib
import importlib.metadata
import importlib.util
import os
import platform as host
import re
import shutil
import subprocess
import sys

OK, NOTE, FIX = "ok", "note", "FIX"

PYTHON = (3, 10)  # the least, as pyproject.toml has it
# name of the distribution: (least, below), as pyproject.toml has them
REQUIRED = {
    "torch": ((2, 10), None),
    "triton": ((3, 6), (3, 10)),
    "numpy": ((1, 26), None),
    "safetensors": ((0, 4), None),
}
OPTIONAL = {"transformers": ((5, 15), None), "accelerate": ((1, 0), None)}
# The triton that GPU builds of torch require, for builds that require none, which are for CPUs.
TRITON_OF_TORCH: dict[tuple[int, ...], tuple[int, ...]] = {
    (2, 10): (3, 6), (2, 11): (3, 6), (2, 12): (3, 7), (2, 13): (3, 7), (2, 14): (3, 8), (2, 15): (3, 9)
}  # fmt: skip
VMEM = {"cuda-bindings": ((12, 8), None)}

_VARIABLES = ("IRIS_ALLOCATOR", "IRIS_DEBUG", "IRIS_OP_GRAPHS", "IRIS_RATES", "IRIS_TIMEOUT")
_ALLOCATORS = ("torch", "vmem")
# of the largest tiles of bf16: three stages of 128 x 64 and 64 x 256
_SHARED_MEMORY = 3 * (128 * 64 + 64 * 256) * 2
_SHM = 1 << 30


@dataclass(frozen=True)
class Finding:
    level: str
    what: str
    remedy: str = ""


def examine() -> list[Finding]:
    """Return all findings about this machine and this environment."""
    checks = [versions, namesake, pair, launcher, gpus, peers, links, measured, virtual_memory, memory, environment]
    if importlib.util.find_spec("torch") is None:
        checks = [versions, namesake, pair, memory, environment]
    return [finding for check in checks for finding in check()]


def show(findings: list[Finding]) -> int:
    """Print the findings; return 1 if something is to be fixed."""
    for finding in findings:
        print(f"{finding.level:>4}  {finding.what}")
        if finding.remedy:
            print(f"      -> {finding.remedy}")
    faults = sum(finding.level == FIX for finding in findings)
    print(f"{faults} to fix" if faults else "nothing to fix")
    return 1 if faults else 0


def versions() -> Iterator[Finding]:
    python = f"python {host.python_version()}, {host.system()} {host.machine()}"
    if sys.version_info[:2] < PYTHON:
        yield Finding(FIX, f"{python}; expected >={_dotted(PYTHON)}", f"install Python {_dotted(PYTHON)} or newer")
    else:
        yield Finding(OK, python)
    if sys.platform != "linux":
        yield Finding(FIX, f"the system is {sys.platform}", "run on Linux")
    for required, bounds in ((True, REQUIRED), (False, OPTIONAL)):
        for name, (least, below) in bounds.items():
            yield _version(name, least, below, required, "Hugging Face models")


def namesake() -> Iterator[Finding]:
    """Check whether the other package that is imported as `iris` is installed, whose files then lie among ours."""
    if other := _installed("scitools-iris"):
        remedy = "an environment for each; in this one: pip uninstall scitools-iris, then install iris-tp again"
        yield Finding(FIX, f"scitools-iris {other} is installed, whose package is called iris, too", remedy)


def _version(
    name: str, least: tuple[int, ...], below: tuple[int, ...] | None, required: bool, purpose: str = ""
) -> Finding:
    """Return a finding on a package's version; `purpose`: its use, where it is not required."""
    bounds = f">={_dotted(least)}" + (f",<{_dotted(below)}" if below else "")
    given = _installed(name)
    if given is None:
        missing = f"{name} is not installed"
        use = "" if required else f"  (for {purpose})"
        return Finding(FIX if required else NOTE, missing, f"pip install '{name}{bounds}'{use}")
    release = _release(given)
    if release < least or (below and release >= below):
        return Finding(FIX, f"{name} is {given}; expected {bounds}", f"pip install '{name}{bounds}'")
    return Finding(OK, f"{name} {given}")


def _installed(name: str) -> str | None:
    """Return the version of a distribution; torch for AMD brings Triton under other names."""
    for each in (name, "pytorch-triton-rocm", "triton-rocm") if name == "triton" else (name,):
        try:
            return importlib.metadata.version(each)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def pair() -> Iterator[Finding]:
    """Check that torch and triton go together: a GPU build of torch calls the compiler of one triton, which it
    requires.

    A build for CPUs requires none, and Triton's interpreter works in any version that `REQUIRED` takes.
    """
    torch, triton = _installed("torch"), _installed("triton")
    if torch is None or triton is None:
        return
    for requirement in importlib.metadata.requires("torch") or []:
        match = re.match(r"(?:pytorch-)?(triton(?:-rocm)?) *\(?([=~<>!][^;)]*)", requirement)
        if match and "extra ==" not in requirement:
            name, clauses = requirement[: match.start(2)].rstrip(" ("), match[2].replace(" ", "")
            if not _satisfies(triton, clauses):
                what = f"torch {torch} requires {name}{clauses}, and triton is {triton}: they do not go together"
                yield Finding(FIX, what, _pair_remedy(f"{name}{clauses}", _release(clauses)[:2]))
            return
    other = TRITON_OF_TORCH.get(_release(torch)[:2])
    if other and other != _release(triton)[:2]:
        what = f"torch {torch} is a build for CPUs: Triton's interpreter runs with triton {triton}"
        yield Finding(OK, f"{what}; a GPU build requires {_dotted(other)}")


def launcher() -> Iterator[Finding]:
    """Check that a kernel that was launched before can be launched past triton's look-up."""
    try:
        from iris.triton_private import direct_launch_lacks
    except ImportError as error:
        yield Finding(FIX, f"iris cannot be imported: {error}", "fix the findings above first")
        return
    if lacking := direct_launch_lacks():
        what = f"triton {_installed('triton')} has another launcher ({', '.join(lacking)}): some 50 us more a launch"
        yield Finding(NOTE, what, "pip install the triton that torch requires")
    else:
        yield Finding(OK, "kernels that were launched before are launched directly")


def _pair_remedy(requirement: str, required: tuple[int, ...]) -> str:
    """Return the command for the triton that torch requires, or for a torch whose triton this library supports."""
    least, below = REQUIRED["triton"]
    if below and least <= required < below:
        return f"pip install '{requirement}'"
    first, last = min(TRITON_OF_TORCH), max(TRITON_OF_TORCH)
    return f"pip install 'torch>={_dotted(first)},<{_dotted((last[0], last[1] + 1))}'"


def _satisfies(version: str, clauses: str) -> bool:
    """Return whether a release satisfies clauses such as `==3.6.0`, `~=3.8.0`, `>=3.6,<3.7`."""
    given = _release(version)
    for operator, text in re.findall(r"([=~<>!]=|[<>])([\d.]+)", clauses):
        bound = _release(text)
        front = given[: len(bound)]
        holds = {
            "==": front == bound,
            "!=": front != bound,
            "~=": front[:-1] == bound[:-1] and front >= bound,
            ">=": given >= bound,
            "<=": given <= bound,
            ">": given > bound,
            "<": given < bound,
        }[operator]
        if not holds:
            return False
    return True


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def gpus() -> Iterator[Finding]:
    import torch

    built_for = torch.version.cuda and f"CUDA {torch.version.cuda}" or torch.version.hip and f"ROCm {torch.version.hip}"
    device_files = _device_files()
    if not torch.cuda.is_available():
        if device_files and not built_for:
            yield Finding(FIX, "there is a GPU and torch is a build for CPUs", "install torch for CUDA or ROCm")
        elif device_files:
            yield Finding(
                FIX,
                f"torch is built for {built_for} and sees no GPU, though {device_files[0]} is there",
                "look at CUDA_VISIBLE_DEVICES, at the driver (nvidia-smi), and at the rights of the container",
            )
        else:
            yield Finding(NOTE, "no GPU: kernels run in Triton's interpreter, which is right but not fast")
        return
    yield Finding(OK, f"torch is built for {built_for}")
    for index in range(torch.cuda.device_count()):
        yield from _gpu(index)
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        yield Finding(NOTE, "TRITON_INTERPRET is set: kernels run on the CPU in spite of the GPUs", "unset it")
    if not any(shutil.which(name) for name in (os.environ.get("CC") or "cc", "gcc", "clang")):
        yield Finding(FIX, "no C compiler, with which Triton builds its launchers", "install gcc, or set CC")
    backends = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    if not backends:
        yield Finding(FIX, "torch has no NCCL, by which the ranks find each other", "install another build of torch")


def _device_files() -> list[str]:
    """Return the files by which drivers of GPUs show that there is one."""
    return [path for path in ("/dev/nvidiactl", "/dev/kfd") if os.path.exists(path)]


def _gpu(index: int) -> Iterator[Finding]:
    import torch

    properties = torch.cuda.get_device_properties(index)
    name = f"GPU {index}: {properties.name}, {properties.total_memory >> 30} GiB"
    name += f", {properties.multi_processor_count} multiprocessors"
    if torch.version.hip:
        yield Finding(NOTE, name, "the same source, compiled in tests for gfx942 and gfx950, not run there")
    elif properties.major < 9:
        yield Finding(
            NOTE, name, "older than Hopper (sm_90), for which the kernels are written: neither tested nor measured"
        )
    else:
        yield Finding(OK, name)
    shared = getattr(properties, "shared_memory_per_block_optin", _SHARED_MEMORY)
    if shared < _SHARED_MEMORY:
        yield Finding(
            NOTE,
            f"GPU {index} gives a program {shared >> 10} KiB of shared memory; the largest tiles take"
            f" {_SHARED_MEMORY >> 10}",
            "plans load less ahead there, or take smaller tiles, which is slower",
        )


def peers() -> Iterator[Finding]:
    """Check that each GPU can address every other one's memory: without it there is no symmetric heap."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    blind = [f"{a} to {b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    if blind:
        yield Finding(
            FIX,
            f"no peer access between GPUs: {', '.join(blind)}",
            "use GPUs of one NVLink island (CUDA_VISIBLE_DEVICES); on PCIe look at IOMMU and ACS in the BIOS",
        )
    elif pairs:
        yield Finding(OK, f"peer access between all {count} GPUs")
    elif count:
        yield Finding(OK, "one GPU: with IRIS_SHARE_GPUS=1 several ranks take turns on it, for tests")


def links() -> Iterator[Finding]:
    """Report the links between GPUs, from nvidia-smi."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return
    try:
        result = subprocess.run([tool, "topo", "-m"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        yield Finding(NOTE, f"nvidia-smi does not answer: {error}")
        return
    by_kind: dict[str, list[str]] = {}
    for pair, kind in topology(result.stdout).items():
        by_kind.setdefault(kind, []).append(f"{pair[0]}-{pair[1]}")
    for kind, pairs in sorted(by_kind.items()):
        if kind.startswith("NV"):
            yield Finding(OK, f"NVLink ({kind}) between GPUs {', '.join(pairs)}")
        else:
            yield Finding(
                NOTE, f"no NVLink but {kind} between GPUs {', '.join(pairs)}", "expect a fraction of NVLink's rate"
            )


def topology(text: str) -> dict[tuple[int, int], str]:
    """Return (GPU, GPU) to the kind of their connection, from the output of `nvidia-smi topo -m`."""
    rows = [re.sub(r"\x1b\[\d*m", "", line).split() for line in text.splitlines()]
    columns = next((row for row in rows if row[:2] == ["GPU0", "GPU1"]), [])
    ours = [name for name in columns if re.fullmatch(r"GPU\d+", name)]
    links_of: dict[tuple[int, int], str] = {}
    for row in rows:
        if row and row[0] in ours and row != columns:
            a = int(row[0][3:])
            kinds = zip(ours, row[1:], strict=False)
            links_of |= {(a, int(name[3:])): kind for name, kind in kinds if a < int(name[3:])}
    return links_of


def measured() -> Iterator[Finding]:
    """Report by which rates plans are made for the GPUs: a measured table's, or those of a data sheet."""
    import torch

    try:
        from iris.errors import PlatformError
        from iris.machines import machine_at
    except ImportError:  # `launcher` reports it
        return
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = [torch.device("cuda", index) for index in range(count)] or [torch.device("cpu")]
    try:
        machines = dict.fromkeys(machine_at(device) for device in devices)
    except PlatformError as error:
        yield Finding(FIX, str(error))
        return
    for machine in machines if count else ():
        known = machine.source.startswith("measured")
        remedy = "" if known or count < 2 else "iris-tp calibrate, which takes two minutes"
        yield Finding(OK if known else NOTE, f"plans for {machine.name}: rates {machine.source}", remedy)


def virtual_memory() -> Iterator[Finding]:
    """Check NVIDIA's bindings, by which allocator "vmem" maps GPU memory: required where the environment selects it."""
    import torch

    if not torch.cuda.is_available() or torch.version.hip:
        return
    lacking = FIX if os.environ.get("IRIS_ALLOCATOR") == "vmem" else NOTE
    purpose = f'allocator_type="vmem"; the version of torch\'s CUDA, {torch.version.cuda}'
    for name, (least, below) in VMEM.items():
        finding = _version(name, least, below, False, purpose)
        if finding.level == OK and (error := _broken("cuda.bindings.driver")):
            remedy = f"pip install --force-reinstall '{name}>={_dotted(least)}'  (for {purpose})"
            finding = Finding(lacking, f"{finding.what} cannot be imported: {error}", remedy)
        yield finding if finding.level == OK else replace(finding, level=lacking)


def _broken(module: str) -> str:
    """Return the reason for which `module` cannot be imported, or ""."""
    try:
        importlib.import_module(module)
    except Exception as error:  # any error of a package that does not match the driver
        return str(error) or type(error).__name__
    return ""


def memory() -> Iterator[Finding]:
    """Check shared memory of the host: NCCL, on GPUs, takes it; CPU ranks open each other's through /proc."""
    if os.path.isdir("/dev/shm") and _device_files():
        size = shutil.disk_usage("/dev/shm").total
        if size < _SHM:
            yield Finding(
                FIX, f"/dev/shm has {size >> 20} MiB, too little for NCCL", "docker run --shm-size=8g, or --ipc=host"
            )
        else:
            yield Finding(OK, f"/dev/shm has {size / 2**30:.1f} GiB")
    fd = os.memfd_create("iris-doctor")
    try:
        script = f"open('/proc/{os.getpid()}/fd/{fd}', 'rb')"
        opened = subprocess.run([sys.executable, "-c", script], capture_output=True).returncode == 0
    finally:
        os.close(fd)
    if opened:
        yield Finding(OK, "processes can open each other's memory, as ranks on CPUs do")
    else:
        yield Finding(
            FIX,
            "a process cannot open another's memory through /proc: no ranks on CPUs",
            "mount /proc without hidepid, and run the ranks as one user",
        )


def environment() -> Iterator[Finding]:
    """Check the environment variables that the library reads."""
    for name, value in sorted(os.environ.items()):
        if not name.startswith("IRIS_"):
            continue
        if name not in _VARIABLES:
            yield Finding(NOTE, f"{name}={value} is not a known variable", f"known are {', '.join(_VARIABLES)}")
        elif name == "IRIS_ALLOCATOR" and value not in _ALLOCATORS:
            yield Finding(FIX, f"IRIS_ALLOCATOR is {value!r}", f"expected one of {', '.join(_ALLOCATORS)}")
        elif name in ("IRIS_DEBUG", "IRIS_OP_GRAPHS") and value not in ("0", "1", ""):
            yield Finding(FIX, f"{name} is {value!r}", "expected 0 or 1")
        elif name == "IRIS_TIMEOUT" and not _is_timeout(value):
            yield Finding(FIX, f"IRIS_TIMEOUT is {value!r}", "expected seconds, greater than 0 and at most 1e9")
        else:
            yield Finding(OK, f"{name}={value}")


def _is_timeout(text: str) -> bool:
    try:
        return 0 < float(text) <= 1e9
    except ValueError:
        return False
