"""What mkdocs is told beyond mkdocs.yml: pages named by a pattern, links out of docs/, SECURITY.md, and timelines.

A link to a file outside docs/ works in a checkout and on the repository's page. On the site it becomes the file's
address in the repository; where there is no such file, the build fails.
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
sys.path.insert(0, str(DOCS))  # for the module beside this one
import timeline  # noqa: E402

_log = logging.getLogger("mkdocs.hooks.docs")


def on_config(config: Any) -> Any:
    """Fills in the patterns of the navigation, and adds the fence that draws timelines."""
    config.nav = _expanded(config.nav)
    fences = config.mdx_configs.setdefault("pymdownx.superfences", {}).setdefault("custom_fences", [])
    fences.append({"name": "timeline", "class": "timeline", "format": timeline.fence})
    return config


def _expanded(nav: list[Any]) -> list[Any]:
    found: list[Any] = []
    for item in nav:
        if isinstance(item, dict):
            found += [{title: _expanded(value) if isinstance(value, list) else value} for title, value in item.items()]
        elif item.endswith("/*"):
            pages = sorted(path.relative_to(DOCS).as_posix() for path in (DOCS / item).parent.glob("*.md"))
            found += [page for page in pages if page not in nav]
        else:
            found.append(item)
    return found


def on_files(files: Any, config: Any) -> Any:
    """SECURITY.md stands where forges look for it; the site has it as a page."""
    from mkdocs.structure.files import File

    text = (ROOT / "SECURITY.md").read_text()
    page = LINK.sub(lambda link: _as_seen_from(DOCS / "security.md", ROOT / link[1]) + (link[2] or ""), text)
    files.append(File.generated(config, "security.md", content=page))
    return files


def _as_seen_from(page: Path, target: Path) -> str:
    return Path(os.path.relpath(target.resolve(), page.parent)).as_posix()


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links out of docs/ become addresses in the repository; wide tables get the room of the headings' list."""
    folder = (DOCS / page.file.src_uri).parent
    if page.file.src_uri.startswith(WIDE):
        page.meta["hide"] = ["toc"]

    def outside(link: re.Match[str]) -> str:
        target = (folder / link[1]).resolve()
        if target.is_relative_to(DOCS):
            return link[0]
        if target == ROOT / "SECURITY.md":
            return _as_seen_from(DOCS / page.file.src_uri, DOCS / "security.md") + (link[2] or "")
        if not target.is_relative_to(ROOT) or not target.exists():
            _log.warning("%s: a link leads to %s, which is not there", page.file.src_uri, link[1])
            return link[0]
        return f"{config.repo_url}/blob/main/{target.relative_to(ROOT).as_posix()}{link[2] or ''}"

    parts = re.split(r"(^```.*?^```)", markdown, flags=re.MULTILINE | re.DOTALL)  # links in code are code
    return "".join(part if part.startswith("```") else LINK.sub(outside, part) for part in parts)
