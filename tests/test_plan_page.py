"""The planner's page shows the planner's own results at its points, and a browser can display and move it."""

import html
from itertools import product
from pathlib import Path
import random
import re
import shutil
import subprocess

from iris.machines import machine_named
from iris_ops.planning.plan import WAYS, compare_ways, plan
from iris_ops.problem import Request, requested_problem
from iris_tp import cli
from iris_tp.plan_page import GPUS, Grid, MixtureGrid, page, survey, unpacked
import pytest
import torch

from tests.processes import patient

MIXTURES = MixtureGrid(tokens=(4, 512), experts=(8, 128), top_k=(1, 8), sizes=MixtureGrid().sizes[1:3])
SMALL = Grid(gpus=("h200", "mi300x"), ranks=(2, 4), M=(1, 200, 512, 8192), N=(2560, 8192), K=(2048, 7168))
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def table() -> dict:
    return survey(SMALL, MIXTURES)


@pytest.fixture(scope="module")
def file(table: dict, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "planner.html"
    path.write_text(page(table))
    return path


def test_points_are_what_the_planner_says(table: dict) -> None:
    axes, words = table["axes"], table["words"]
    points = dict(zip(product(*axes.values()), table["points"], strict=True))
    assert list(axes) == ["gpus", "ranks", "ops", "M", "N", "K"]
    for (gpu, ranks, op, M, N, K), (ways, rejected) in random.sample(sorted(points.items()), 40):
        problem, machine = requested_problem(Request(op, M, N, K, ranks, torch.bfloat16)), machine_named(*GPUS[gpu])
        chosen = plan(problem, machine)
        reported = chosen.explain()
        for way in ways:  # as `explain` prints them
            label, (total, gemm, link) = words[way[0]], (f"{tenths / 10:9.1f} us" for tenths in way[1:])
            row = next(line for line in reported.splitlines() if line.startswith(f"{label} ") or line == label)
            assert row.endswith(f"product {gemm}, link {link}, together {total}"), (row, way)
        assert words[ways[0][0]].split()[0].rstrip(",") == chosen.kernel
        kernels = {each.way.kernel for each in compare_ways(WAYS, problem, machine).candidates}
        assert {words[way[0]].split()[0].rstrip(",") for way in ways} == kernels
        messages = [f"rejected {words[kernel]}: {words[reason]}" for kernel, reason in rejected]
        assert messages == [line for line in reported.splitlines() if line.startswith("rejected ")]


def test_a_page_holds_its_table_and_nothing_from_outside(table: dict, file: Path) -> None:
    assert unpacked(file.read_text()) == table
    assert re.findall(r"https?:|//[a-z]", file.read_text().replace(file.read_text().split('id="table">')[1], "")) == []


def test_the_command_refuses_what_it_cannot_do(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["plan", "--html", str(tmp_path)]) == 2
    assert "cannot be written" in capsys.readouterr().err
    for arguments in (["plan", "matmul_all_reduce", "--html", "page.html"], ["plan", "matmul_all_reduce", "1", "2"]):
        assert cli.main(arguments) == 2
    assert "required: op, M, N, K" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_writes_the_page(tmp_path: Path) -> None:
    assert cli.main(["plan", "--html", str(tmp_path / "new" / "page.html")]) == 0
    text = (tmp_path / "new" / "page.html").read_text()
    assert len(text) < 1 << 20 and unpacked(text)["axes"]["ops"] == list(Grid().ops)


# --- in a browser ----------------------------------------------------------------------------------------------------


def shown(file: Path, where: str, folder: Path) -> str:
    """The page as it stands once its script has run."""
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}"]
    command += ["--virtual-time-budget=20000", "--dump-dom", f"{file.as_uri()}#{where}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=patient(60))
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def text_of(dom: str, name: str) -> str:
    return html.unescape(re.search(rf'id="{name}"[^>]*>([^<]*)<', dom)[1])


in_browser = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")]


@pytest.mark.parametrize("ranks, M, N, K", [(2, 512, 8192, 2048)])
class TestInBrowser:
    pytestmark = in_browser

    def test_it_says_who_wins_by_how_much_and_why(
        self, ranks: int, M: int, N: int, K: int, file: Path, tmp_path: Path
    ) -> None:
        where = f"gpus=h200&ranks={ranks}&ops=matmul_all_reduce&M={M}&N={N}&K={K}"
        dom = shown(file, where, tmp_path)
        chosen = plan(
            requested_problem(Request("matmul_all_reduce", M, N, K, ranks, torch.bfloat16)),
            machine_named(*GPUS["h200"]),
        )
        times = chosen.prediction
        assert text_of(dom, "verdict").startswith(f"{chosen.kernel} wins: {times.total_us:.1f} µs.")
        assert f"Its product takes {times.gemm_us:.1f} µs and its link {times.link_us:.1f} µs" in text_of(dom, "why")
        command = f"iris-tp plan matmul_all_reduce {M} {N} {K} --ranks {ranks} --gpu h200"
        assert text_of(dom, "command") == command and cli.main(command.split()[1:]) == 0
