"""The words of documentation and code: none of them is retired, and docstrings of functions begin with a verb.

`RETIRED` has the retired words, each with the field's word for it. Files that a page names exist.
"""

import ast
import io
from pathlib import Path
import pkgutil
import re
import tokenize

import pytest

from tests.processes import ROOT

DOCS = ROOT / "docs"
PAGES = [ROOT / name for name in ("README.md", "CHANGELOG.md", "SECURITY.md")]
PAGES += sorted(DOCS.rglob("*.md"))

RETIRED = {
    # words of prose
    r"told|said": "reports, prints, is documented",
    r"kin": "name the things",
    r"mend|mends|mended|mending": "fix, correct",
    r"stand-ins?|stands? in for": "fallback",
    r"stretch|stretches": "split, range",
    r"hears?": "receives",
    r"weigh|weighs|weighed|weighing": "compare",
    r"seeks?": "look for",
    r"behind it|behind them|behind the stroke": "after",
    r"in eight bits|eight bits": "fp8, 8 bits",
    r"who has|whoever has": "name the reader or the rank",
    r"of so many": "name the number",
    r"in words|by words|travel in words": "by the Lamport protocol",
    r"warps? with roles|warps of roles": "warp-specialised",
    r"depths": "k_per_rank",
    # names of code that have another name now
    r"[a-z_]*_roles": "warp_specialised",
    r"owned_tiles": "tile_orders",
    r"few_rows(_gather)?": "lamport_matmul, lamport_gather_matmul",
    r"shard_sums": "copy_reduce",
    r"step_product": "skinny_matmul",
    r"norm_ahead": "rmsnorm_epilogue",
    r"weigh_kernel": "combine_kernel",
    r"stretch_kernel": "split_kernel",
    r"by_tree|by_halves": "order",
    r"stand_in": "fallback",
}
KEPT = {
    "timeline_roles_h200_x4": "a result file",
}
"""What a page may say all the same: names that files and parameters have today."""


def prose(text: str) -> str:
    """Return a page without its front matter, code blocks and comments."""
    text = re.sub(r"\A---\n.*?^---\n", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^```.*?^```", "\n", re.sub("<!--.*?-->", "", text, flags=re.DOTALL), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"^( {4}|\t).*$", "", text, flags=re.MULTILINE)


def retired(text: str) -> list[str]:
    """Return the retired words of a page, each with its line and the word to use."""
    for name in KEPT:
        text = text.replace(name, "")
    found = []
    for word, instead in RETIRED.items():
        for match in re.finditer(rf"(?<![\w-])(?:{word})(?![\w-])", prose(text), re.IGNORECASE):
            line = prose(text)[: match.start()].rpartition("\n")[2] + prose(text)[match.start() :].partition("\n")[0]
            found.append(f"{match[0]!r} (say: {instead}) in: {line.strip()[:100]}")
    return found


PATHS = re.compile(r"`((?:iris|iris_ops|layers|iris_tp|benchmarks|examples|tests|docs)/[\w./-]+)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    assert [path for path in PATHS.findall(page.read_text()) if not (ROOT / path).exists()] == []


NAMES = re.compile(r"(?<![\w./-])(?:iris|iris_ops|layers|iris_tp)(?:\.[A-Za-z_]\w*)+(?![\w./-]*/)")
# without the pages of earlier names, and of those of another library
CURRENT = [
    each for each in PAGES if "lab" not in each.parts and each.name not in ("CHANGELOG.md", "coming-from-iris.md")
]


def missing_names(text: str) -> list[str]:
    """Return the names of the library in a page's inline code that do not exist."""
    missing = []
    for name in {name for span in re.findall(r"`([^`\n]+)`", prose(text)) for name in NAMES.findall(span)}:
        try:
            pkgutil.resolve_name(name)
        except (AttributeError, ImportError):
            missing.append(name)
    return [name for name in missing if not name.endswith((".py", ".md"))]


@pytest.mark.parametrize("page", CURRENT, ids=lambda page: page.name)
def test_names_of_the_library_that_a_page_names_exist(page: Path) -> None:
    assert missing_names(page.read_text()) == []


def test_missing_names_are_found() -> None:
    text = "`kept = iris.memory.outputs.Kept()` and `iris.memory.outputs.GraphOutputs()`, in `iris/heap.py`."
    assert missing_names(text) == ["iris.memory.outputs.Kept"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_has_a_retired_word(page: Path) -> None:
    assert retired(page.read_text()) == []


def test_retired_words_are_found_in_prose_only() -> None:
    text = "The rank is told so.\n\n```python\ntold = 1\n```\n\nStand-ins run.\n"
    assert [each.split(" ")[0] for each in retired(text)] == ["'told'", "'Stand-ins'"]
    assert retired("A kinder, retold story about `timeline_roles_h200_x4`.") == []


SOURCES = ("iris", "iris_ops", "layers", "iris_tp", "benchmarks", "examples")
NO_VERBS = set(
    "a all an and as at by each for from how if in its it no of on one or over same some that the their there these "
    "this those to two what when where whether which who whose why with without".split()
)
"""First words of docstrings that leave out the verb."""
VERBS_IN_S = {"Pass", "Process", "Address", "Compress", "Discuss", "Guess", "Express"}


RETIRED_NAMES = set(
    "told said asked found made kin behind beside wanted stretch stand_in meet meeting fits serves suits by_tree "
    "by_halves eight_bits weigh_kernel stretch_kernel".split()
)
"""Names that hide what a variable, parameter or function holds."""
KEPT_NAMES = {
    "iris/device/tiles.py": {"found"},
    "examples/tile_all_reduce_hopper.py": {"found"},
    "benchmarks/vllm.py": {"beside"},
}
"""The public keyword of `tiles.sum(..., found=tiles.look(...))`, and an option of a command."""


def retired_names(source: str) -> dict[str, int]:
    """Return the retired names in Python source, each with the first line that has it."""
    names: dict[str, int] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME and token.string.strip("_") in RETIRED_NAMES:
            names.setdefault(token.string, token.start[0])
    return names


@pytest.mark.parametrize("package", SOURCES)
def test_no_name_of_code_is_retired(package: str) -> None:
    wrong = []
    for path in sorted((ROOT / package).rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        names = retired_names(path.read_text())
        wrong += [f"{name}:{line} {word}" for word, line in names.items() if word not in KEPT_NAMES.get(name, ())]
    assert wrong == []


def test_retired_names_are_found_in_code_only() -> None:
    assert retired_names("# told\nx = 'found'\n_found = x\n") == {"_found": 3}


def begins_with_a_verb(docstring: str) -> bool:
    """Return whether the first word can be an imperative: a capitalised word, none of `NO_VERBS`, without an "s"."""
    match = re.match(r"([A-Z][a-z-]+)[ ,.:]", docstring)
    if match is None or match[1].lower() in NO_VERBS:
        return False
    return not match[1].endswith("s") or match[1] in VERBS_IN_S


@pytest.mark.parametrize("package", SOURCES)
def test_docstrings_of_functions_begin_with_a_verb(package: str) -> None:
    wrong = []
    for path in sorted((ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                docstring = ast.get_docstring(node)
                if docstring and not begins_with_a_verb(docstring):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {docstring.splitlines()[0]}")
    assert wrong == []


def test_docstrings_without_a_verb_are_found() -> None:
    good = ("Return it.", "Pass the ball.", "Right-pad rows.", "Compute `out`.")
    bad = ("The sum.", "`out` of it.", "Returns it.", "(row, column) of it.", "What it is.", "Of a tile.", "Columns.")
    assert [text for text in (*good, *bad) if begins_with_a_verb(text)] == list(good)
