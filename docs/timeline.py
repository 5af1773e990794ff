"""Draws a timeline from a fence of text: who does what, from when to when.

    ```timeline
    MMA warps: product 0-4 tile 1, product 4-8 tile 2
    mover warps: push 4-6 1, wait 6-7, sum 7-8 2
    ```

A line is a lane, and an entry is a kind, a span in units of the reader's choice, and a label. The picture is an SVG
within the page, whose colours site.css gives for light and dark; where nothing draws it, the text says the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
import re
from typing import Any

KINDS = ("product", "push", "sum", "wait", "signal", "copy", "load")
_ENTRY = re.compile(r"(\w+) ([\d.]+)-([\d.]+) ?(.*)")
_WIDTH, _LANE, _BAR, _NAMES, _LEGEND = 720, 34, 24, 150, 26


@dataclass(frozen=True)
class Span:
    kind: str
    begin: float
    end: float
    label: str


def lanes(text: str) -> list[tuple[str, list[Span]]]:
    """Raises ValueError where a line is none of a timeline's."""
    found = []
    for line in filter(None, map(str.strip, text.splitlines())):
        name, colon, entries = line.partition(":")
        spans = []
        for entry in filter(None, map(str.strip, entries.split(","))):
            match = _ENTRY.fullmatch(entry)
            if not colon or match is None or match[1] not in KINDS or float(match[2]) >= float(match[3]):
                raise ValueError(f"{entry!r} in {line!r}; expected 'KIND BEGIN-END LABEL', KIND one of {KINDS}")
            spans.append(Span(match[1], float(match[2]), float(match[3]), match[4]))
        found.append((name.strip(), spans))
    return found


def draw(text: str) -> str:
    """The timeline as SVG."""
    rows = lanes(text)
    scale = (_WIDTH - _NAMES - 4) / max(span.end for _, spans in rows for span in spans)
    height = len(rows) * _LANE + _LEGEND
    said = "; ".join(f"{name}: {', '.join(f'{s.kind} {s.label}'.strip() for s in spans)}" for name, spans in rows)
    parts = [
        f'<svg class="timeline" viewBox="0 0 {_WIDTH} {height}" role="img" xmlns="http://www.w3.org/2000/svg">',
        f"<title>{escape(said)}</title>",
    ]
    for number, (name, spans) in enumerate(rows):
        y = number * _LANE
        parts.append(f'<text x="0" y="{y + 17}" class="lane">{escape(name)}</text>')
        parts.append(f'<line x1="{_NAMES}" x2="{_WIDTH}" y1="{y + _BAR + 4}" y2="{y + _BAR + 4}" class="axis"/>')
        for span in spans:
            x, width = _NAMES + span.begin * scale, (span.end - span.begin) * scale - 2
            parts.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}" rx="3" class="{span.kind}"/>')
            middle = x + width / 2
            parts.append(f'<text x="{middle:.1f}" y="{y + 16}" class="label">{escape(span.label)}</text>')
    x = float(_NAMES)
    for kind in (kind for kind in KINDS if any(span.kind == kind for _, spans in rows for span in spans)):
        y = len(rows) * _LANE + 6
        parts.append(f'<rect x="{x:.0f}" y="{y}" width="12" height="12" rx="2" class="{kind}"/>')
        parts.append(f'<text x="{x + 17:.0f}" y="{y + 11}" class="key">{kind}</text>')
        x += 40 + 8 * len(kind)
    parts.append(f'<text x="{_WIDTH}" y="{height - 9}" class="time">time →</text></svg>')
    return "".join(parts)


def fence(source: str, language: str, css_class: str, options: dict[str, Any], md: Any, **kwargs: Any) -> str:
    """What pymdownx.superfences calls for a fence of this language."""
    return f'<div class="timeline">{draw(source)}</div>'
