"""The tables and plots of README and docs, from the result files in `benchmarks/results`.

    python -m benchmarks.report                     writes every table where it lies
    python -m benchmarks.report --plots             and draws the plots that pages show
    python -m benchmarks.report FILE... [--plots]   prints all rows of these files; with --plots draws them

Which table stands where, `tables/pages.py` says. Plots need matplotlib (`pip install -e '.[bench]'`).
"""

import argparse
import json
from pathlib import Path
import re
import shutil
import sys
import tempfile

from benchmarks.measuring.report import RESULTS
from benchmarks.tables.pages import EVERY_ROW, ROOT, maker_of, pages

PLOTS = ROOT / "docs" / "plots"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.report", description="Writes all tables of README and docs, or prints those of FILES."
    )
    parser.add_argument("files", nargs="*", type=Path, help="results whose rows are printed; default: the docs' tables")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a page would change")
    parser.add_argument("--plots", action="store_true", help="draw the plots, too; needs matplotlib")
    parser.add_argument("--out", type=Path, default=PLOTS, help="folder of the plots")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    for file in args.files:
        run = json.loads(file.read_text())
        if make := maker_of(run, EVERY_ROW):
            print(make(run), end="\n\n")
        elif not args.plots:
            sys.exit(f"{file}: benchmark is {run.get('benchmark')}; expected one of {', '.join(EVERY_ROW)}")
    if not args.files:
        write(args.check)
    if args.plots:
        draw(args.files or sorted(RESULTS.glob("*.json")), args.out, None if args.files else shown())


def write(check: bool) -> None:
    """Write every page from the current results; with `check`, write none, and exit with 1 if one would change."""
    for path, text, new in pages():
        if new != text:
            name = path.relative_to(ROOT)
            if check:
                sys.exit(f"{name} is out of date: python -m benchmarks.report")
            path.write_text(new)
            print(name)


def shown() -> set[str]:
    """Return the names of the plots in README and on the pages."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    return {name for page in pages for name in re.findall(r"plots/([\w.-]+\.svg)\)", page.read_text())}


def draw(files: list[Path], folder: Path, selected: set[str] | None) -> None:
    """Draw the results: all their plots, or the `selected` ones."""
    # here, for they import matplotlib, which tables do without
    from benchmarks.plots import (
        all_scatter_plots,
        ccl_plots,
        llm_plots,
        ops_plots,
        step_plots,
    )

    drawers = {"ops": ops_plots.draw, "llm": llm_plots.draw, "step": step_plots.draw}
    drawers |= {"ccl": ccl_plots.draw, "all_scatter": all_scatter_plots.draw}
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        picture = maker_of(json.loads(file.read_text()), drawers)
        with tempfile.TemporaryDirectory() as drawn:
            for written in picture(file, Path(drawn)) if picture else []:
                if selected is None or written.name in selected:
                    print(shutil.copy(written, folder))


if __name__ == "__main__":
    main()
