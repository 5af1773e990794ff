"""The list of tables and their pages, and the pages rendered from the results; `benchmarks/report.py` writes them.

A table stands between `<!-- NAME -->` and `<!-- end -->`, and so does a sentence with figures, in one line with both.
`TARGETS` says on which page, so that moving a table is one line here and the two comments there. The tables beside the
result files have every row; `EVERY_ROW` makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
import json
import os
from pathlib import Path
import re

from benchmarks.measuring import report
from benchmarks.tables import (
    age_tables,
    docs_tables,
    every_row,
    hosts_table,
    invariance_tables,
    model_tables,
    page_tables,
    quantised_table,
    regret_table,
    rma_table,
    single_tables,
    vllm_table,
)

ROOT = Path(__file__).resolve().parents[2]


def _of_kernel(name: str, folder: str) -> str:
    make = single_tables.of_mixture_kernel if name.startswith("moe.") else docs_tables.of_kernel
    return make(name, folder)


# name of the table, its page, and its function, which takes the path from the page to the result files
TARGETS: list[tuple[str, str, Callable[[str], str]]] = [
    ("numbers", "README.md", page_tables.numbers),
    ("numbers", "docs/index.md", page_tables.numbers),
    ("summary", "docs/benchmarks.md", page_tables.summary),
    ("invariance costs", "README.md", invariance_tables.step_costs),
    ("invariance costs", "docs/concepts/determinism.md", invariance_tables.step_costs),
    ("ops x4", "docs/benchmarks/ops.md", partial(page_tables.ops, page_tables.OPS_FOUR, page_tables.FOUR)),
    ("ops x2", "docs/benchmarks/ops.md", partial(page_tables.ops, page_tables.OPS_TWO, page_tables.TWO)),
    ("norms x2", "docs/benchmarks/ops.md", page_tables.norms),
    ("means", "docs/benchmarks/ops.md", page_tables.means),
    ("floors", "docs/benchmarks/ops.md", page_tables.floors),
    ("hosts", "docs/benchmarks/ops.md", page_tables.hosts),
    ("results", "docs/benchmarks/results.md", age_tables.measured),
    ("earlier", "docs/benchmarks/results.md", age_tables.earlier),
    ("models x4", "docs/benchmarks/models.md", partial(model_tables.models, 4)),
    ("models x2", "docs/benchmarks/models.md", partial(model_tables.models, 2)),
    ("mixtures x2", "docs/benchmarks/mixtures.md", partial(model_tables.mixtures, 2)),
    ("collectives x4", "docs/benchmarks/collectives.md", partial(page_tables.collectives, 4)),
    ("collectives x2", "docs/benchmarks/collectives.md", partial(page_tables.collectives, 2)),
    ("rooted", "docs/benchmarks/collectives.md", single_tables.rooted),
    ("tiles", "docs/benchmarks/collectives.md", single_tables.tiles),
    ("mixtures", "docs/benchmarks/mixtures.md", single_tables.mixtures),
    ("outputs", "docs/benchmarks/ops.md", single_tables.outputs),
    ("invariance", "docs/benchmarks/determinism.md", invariance_tables.invariance),
    ("invariance ranks", "docs/benchmarks/determinism.md", invariance_tables.invariance_ranks),
    ("invariance models", "docs/benchmarks/determinism.md", invariance_tables.models),
    ("plug-in", "docs/guides/vllm.md", vllm_table.steps),
    ("quantised linears", "docs/benchmarks/quantised.md", quantised_table.linears),
    ("many quantised rows", "docs/benchmarks/quantised.md", partial(quantised_table.many, "local")),
    ("many quantised sums", "docs/benchmarks/quantised.md", partial(quantised_table.many, "sum")),
    ("quantised experts", "docs/benchmarks/quantised.md", quantised_table.experts),
    ("quantised models", "docs/benchmarks/quantised.md", quantised_table.models),
    ("touched experts", "docs/benchmarks/quantised.md", quantised_table.touched),
    ("regret", "docs/lab/regret.md", regret_table.regret),
    ("two hosts", "docs/lab/several-hosts.md", hosts_table.hosts),
    ("lost", "docs/benchmarks/lose.md", lambda folder: docs_tables.lost(of_current=True)),
    ("lost earlier", "docs/benchmarks/lose.md", lambda folder: docs_tables.lost(of_current=False)),
    *((f"measured {name}", page, partial(_of_kernel, name)) for name, page in docs_tables.PAGES.items()),
]


EVERY_ROW: dict[str, Callable[[dict], str]] = dict.fromkeys(
    ("ops", "norms", "routers", "ccl", "rooted", "tiles", "llm", "step", "all_scatter"), every_row.render
) | {"rma": rma_table.render, "regret": regret_table.render, "hosts": hosts_table.render}


def pages() -> Iterator[tuple[Path, str, str]]:
    """Yield every page with tables: its path, its text, and its text rendered anew."""
    for name in dict.fromkeys(page for _, page, _ in TARGETS):
        path = ROOT / name
        text = path.read_text()
        yield path, text, rendered(name, text)
    for path in sorted(report.RESULTS.glob("*.json")):
        if rows := page_of(path):
            page = path.with_suffix(".md")
            yield page, page.read_text() if page.exists() else "", rows


def rendered(page: str, text: str) -> str:
    """Return the `text` of a page with its tables rendered from the results. Raises where a table has no place."""
    folder = Path(os.path.relpath(report.RESULTS, (ROOT / page).parent)).as_posix() + "/"
    for name, of, make in TARGETS:
        if of == page:
            place = re.compile(rf"(<!-- {re.escape(name)} -->)(\n?).*?<!-- end -->", re.DOTALL)
            if not place.search(text):
                raise LookupError(
                    f"{page}: expected <!-- {name} --> and <!-- end -->, for benchmarks/tables/pages.py names it"
                )
            table = make(folder)
            text = place.sub(lambda old, table=table: f"{old[1]}{old[2]}{table}{old[2]}<!-- end -->", text)
    return text


def page_of(path: Path) -> str | None:
    """Return the page next to a result file, if a benchmark of `EVERY_ROW` made it; pages of older files are kept."""
    run = json.loads(path.read_text())
    make = maker_of(run, EVERY_ROW) if run.get("code") else None
    return make(run) + "\n" if make else None


def maker_of(run: dict, makers: dict[str, Callable]) -> Callable | None:
    """Return the one of `makers` with whose name the run's benchmark begins, such as llm of a model's."""
    benchmark = f"{run.get('benchmark')}_"
    return next((make for name, make in makers.items() if benchmark.startswith(f"{name}_")), None)
