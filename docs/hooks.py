"""What mkdocs does beyond mkdocs.yml: pages named by a pattern, pages of files outside docs/, and timelines.

SECURITY.md, CHANGELOG.md and the tables beside the result files stand elsewhere in the repository and are pages of the
site. A link to any other file outside docs/ works in a checkout. The site has text in its place, because the project
has no public home; where there is no such file, the build fails.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
import re
import sys
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
WIDE = ("kernels/", "benchmarks")  # pages whose tables need the room of the table of contents
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
WHOLE_LINK = re.compile(r"(\[[^\]]*\])\((?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?\)")
OUTSIDE = {
    "security.md": ROOT / "SECURITY.md",
    "changelog.md": ROOT / "CHANGELOG.md",
    **{f"benchmarks/results/{path.name}": path for path in sorted((ROOT / "benchmarks/results").glob("*.md"))},
}
PAGE_OF = {path: page for page, path in OUTSIDE.items()}
sys.path.insert(0, str(DOCS))  # for the module beside this one
import timeline  # noqa: E402

_log = logging.getLogger("mkdocs.hooks.docs")


def on_config(config: Any) -> Any:
    """Fill in the patterns of the navigation, and add the fence that draws timelines."""
    config.nav = _expanded(config.nav)
    fences = config.mdx_configs.setdefault("pymdownx.superfences", {}).setdefault("custom_fences", [])
    fences.append({"name": "timeline", "class": "timeline", "format": timeline.fence})
    return config


def _expanded(nav: list[Any]) -> list[Any]:
    items: list[Any] = []
    for item in nav:
        if isinstance(item, dict):
            items += [{title: _expanded(value) if isinstance(value, list) else value} for title, value in item.items()]
        elif item.endswith("/*"):
            pages = sorted(path.relative_to(DOCS).as_posix() for path in (DOCS / item).parent.glob("*.md"))
            items += [page for page in pages if page not in nav]
        else:
            items.append(item)
    return items


def on_files(files: Any, config: Any) -> Any:
    """Make pages of files elsewhere in the repository: SECURITY.md, CHANGELOG.md and the tables of results."""
    from mkdocs.structure.files import File

    for page, source in OUTSIDE.items():
        text = source.read_text()
        moved = LINK.sub(lambda link, page=page, source=source: _moved(link, page, source), text)
        files.append(File.generated(config, page, content=moved))
    return files


def _moved(link: re.Match[str], page: str, source: Path) -> str:
    """Return the target of a link of `source`, as seen from the page that `source` becomes."""
    target = (source.parent / link[1]).resolve()
    target = DOCS / PAGE_OF[target] if target in PAGE_OF else target
    return _as_seen_from(DOCS / page, target) + (link[2] or "")


def _as_seen_from(page: Path, target: Path) -> str:
    return Path(os.path.relpath(target.resolve(), page.parent)).as_posix()


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Lead links out of docs/ to the page of that file, or make them text; give wide tables the sidebar's room."""
    folder = (DOCS / page.file.src_uri).parent
    if page.file.src_uri.startswith(WIDE):
        page.meta["hide"] = ["toc"]

    def outside(link: re.Match[str]) -> str:
        target = (folder / link[2]).resolve()
        if target.is_relative_to(DOCS):
            return link[0]
        if target in PAGE_OF:
            return f"{link[1]}({_as_seen_from(DOCS / page.file.src_uri, DOCS / PAGE_OF[target])}{link[3] or ''})"
        if not target.is_relative_to(ROOT) or not target.exists():
            _log.warning("%s: a link leads to %s, which is not there", page.file.src_uri, link[2])
        return link[1].removeprefix("[").removesuffix("]")

    parts = re.split(r"(^```.*?^```)", markdown, flags=re.MULTILINE | re.DOTALL)  # links in code are code
    return "".join(part if part.startswith("```") else WHOLE_LINK.sub(outside, part) for part in parts)
