"""Draws a timeline from a fence of text: who does what, from when to when.

    ```timeline
    MMA warps: product 0-4 tile 1, product 4-8 tile 2
    mover warps: push 4-6 1, wait 6-7, sum 7-8 2
    ```

A line is a lane, and an entry is a kind, a span in units of the reader's choice, and a label. The picture is an SVG
within the page that fits a phone's screen; site.css gives its colours for light and dark. A lane's name stands above
it, and a label is narrowed to its bar. Where nothing draws it, the text says the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
import re
from typing import Any

KINDS = ("product", "push", "sum", "store", "wait", "signal", "copy", "load")
_ENTRY = re.compile(r"(\w+) ([\d.]+)-([\d.]+) ?(.*)")
_WIDTH, _LANE, _BAR, _NAME, _LEGEND = 480, 52, 24, 18, 26
_LETTER = 6.2  # the width of one in a label


@dataclass(frozen=True)
class Span:
    kind: str
    begin: float
    end: float
    label: str


def lanes(text: str) -> list[tuple[str, list[Span]]]:
    """Parse the lines of a timeline. Raises ValueError for a line that is not a timeline's."""
    rows = []
    for line in filter(None, map(str.strip, text.splitlines())):
        name, _, entries = line.partition(":")
        spans = []
        for entry in map(str.strip, entries.split(",")):
            match = _ENTRY.fullmatch(entry)
            if match is None or match[1] not in KINDS or float(match[2]) >= float(match[3]):
                raise ValueError(f"{entry!r} in {line!r}; expected 'KIND BEGIN-END LABEL', KIND one of {KINDS}")
            spans.append(Span(match[1], float(match[2]), float(match[3]), match[4]))
        rows.append((name.strip(), spans))
    return rows


def draw(text: str) -> str:
    """Return the timeline as SVG."""
    rows = lanes(text)
    scale = (_WIDTH - 2) / max(span.end for _, spans in rows for span in spans)
    height = len(rows) * _LANE + _LEGEND
    title = "; ".join(f"{name}: {', '.join(f'{s.kind} {s.label}'.strip() for s in spans)}" for name, spans in rows)
    parts = [
        f'<svg class="timeline" viewBox="0 0 {_WIDTH} {height}" role="img" xmlns="http://www.w3.org/2000/svg">',
        f"<title>{escape(title)}</title>",
    ]
    for number, (name, spans) in enumerate(rows):
        y = number * _LANE
        parts.append(f'<text x="0" y="{y + 13}" class="lane">{escape(name)}</text>')
        y += _NAME
        parts.append(f'<line x1="0" x2="{_WIDTH}" y1="{y + _BAR + 4}" y2="{y + _BAR + 4}" class="axis"/>')
        for span in spans:
            x, width = span.begin * scale, (span.end - span.begin) * scale - 2
            parts.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}" rx="3" class="{span.kind}"/>')
            middle = x + width / 2
            narrow = f' textLength="{width - 4:.1f}" lengthAdjust="spacingAndGlyphs"'
            fitted = narrow if len(span.label) * _LETTER > width - 4 else ""
            parts.append(f'<text x="{middle:.1f}" y="{y + 16}" class="label"{fitted}>{escape(span.label)}</text>')
    x = 0.0
    for kind in (kind for kind in KINDS if any(span.kind == kind for _, spans in rows for span in spans)):
        y = len(rows) * _LANE + 6
        parts.append(f'<rect x="{x:.0f}" y="{y}" width="12" height="12" rx="2" class="{kind}"/>')
        parts.append(f'<text x="{x + 17:.0f}" y="{y + 11}" class="key">{kind}</text>')
        x += 40 + 8 * len(kind)
    parts.append(f'<text x="{_WIDTH}" y="{height - 9}" class="time">time →</text></svg>')
    return "".join(parts)


def fence(source: str, language: str, css_class: str, options: dict[str, Any], md: Any, **kwargs: Any) -> str:
    """Draw the timeline of a fenced block, for pymdownx.superfences.

    superfences renders the block as text after other exceptions.
    """
    from pymdownx.superfences import SuperFencesException

    try:
        return f'<div class="timeline">{draw(source)}</div>'
    except ValueError as error:
        raise SuperFencesException(str(error)) from error
