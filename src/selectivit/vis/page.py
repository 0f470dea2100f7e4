"""A page that is one file: no scripts, no fonts or styles from elsewhere, light and dark, for desk and phone."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape

STYLE = """
:root { color-scheme: light dark; --ink: #1c1f23; --soft: #5c636b; --line: #d9dde1; --paper: #ffffff; --shade: #f4f6f8;
  --mark: #0072b2; --warn: #fff4d6; --warn-line: #e0b84c; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8ea; --soft: #a2a9b1; --line: #3a4047; --paper: #16191d;
  --shade: #20252a; --mark: #56b4e9; --warn: #33290f; --warn-line: #8a6d1f; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 66rem; margin: 0 auto; padding: 1.5rem 1.25rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .4rem; }
h2 { font-size: 1.25rem; margin: 2.6rem 0 .6rem; padding-top: 1rem; border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.6rem 0 .4rem; }
p { margin: .5rem 0; }
.soft, figcaption { color: var(--soft); font-size: .875rem; }
.warnings { background: var(--warn); border-left: 4px solid var(--warn-line); padding: .6rem 1rem; margin: 1rem 0;
  border-radius: 0 6px 6px 0; overflow-wrap: anywhere; }
.warnings ul { margin: .3rem 0; padding-left: 1.1rem; }
.wide { overflow-x: auto; margin: .8rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .35rem .7rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { font-weight: 600; color: var(--soft); }
th.left, td.left { text-align: left; }
th[scope=colgroup] { text-align: center; }
tbody th { position: sticky; left: 0; background: var(--paper); color: var(--ink); font-weight: 500;
  white-space: normal; min-width: 7.5rem; max-width: 18rem; overflow-wrap: break-word; }
td b { color: var(--mark); }
td small, th small { display: block; font-weight: 400; color: var(--soft); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: .6rem 0; font-size: .9rem; }
dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; }
figure { margin: 1rem 0; }
figure img { display: block; max-width: 100%; height: auto; border-radius: 6px; }
figure.chart img { min-width: 34rem; max-width: 100%; width: 52rem; }
@media (prefers-color-scheme: dark) { figure.chart img {
  filter: invert(.91) hue-rotate(180deg); mix-blend-mode: lighten; } }
.panels { display: grid; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 14rem)); gap: .8rem;
  margin: 1rem 0 1.6rem; }
.panels figure { margin: 0; }
.panels img { width: 100%; }
details { margin: .8rem 0; }
summary { cursor: pointer; color: var(--mark); }
pre { background: var(--shade); padding: .8rem; border-radius: 6px; overflow-x: auto; font-size: .8rem; }
"""

Cell = tuple[str, int]
"""Of a table's head: the text, and how many columns it spans."""


def page(title: str, body: str) -> str:
    """A whole document.

    Args:
        title: plain text.
        body: HTML that goes below the title.

    Returns:
        HTML that needs nothing beside it.

    Example:
        >>> page("A & B", "<p>text</p>").count("A &amp; B")
        2
    """
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n<h1>{escape(title)}</h1>\n{body}\n</main>\n</body>\n</html>\n"
    )


def table(head: Sequence[Sequence[Cell]], rows: Sequence[Sequence[str]], *, left: int, caption: str = "") -> str:
    """A table that moves sideways by itself where the page is narrow; its first column stays.

    Args:
        head: rows of the head, plain text.
        rows: HTML a cell; the first of a row names it.
        left: so many first columns hold text; the others hold numbers.
        caption: plain text above it.

    Returns:
        HTML.

    Example:
        >>> table([[("model", 1), ("mIoU", 1)]], [["a", "<b>0.5</b>"]], left=1).count("<th")
        4
    """
    lines = ["<thead>"]
    for row in head:
        place, cells = 0, []
        for text, span in row:
            kind = ' class="left"' if place < left else ""
            cells.append(f'<th scope="{"colgroup" if span > 1 else "col"}" colspan="{span}"{kind}>{escape(text)}</th>')
            place += span
        lines.append(f"<tr>{''.join(cells)}</tr>")
    lines.append("</thead>\n<tbody>")
    for first, *others in rows:
        kinds = [' class="left"' if place < left else "" for place in range(1, len(others) + 1)]
        cells = [f"<td{kind}>{cell}</td>" for kind, cell in zip(kinds, others, strict=True)]
        lines.append(f'<tr><th scope="row" class="left">{first}</th>{"".join(cells)}</tr>')
    whole = "\n".join(lines)
    # Not a <caption>: that would be as wide as the table, and move sideways with it.
    told = f'<p class="soft">{escape(caption)}</p>' if caption else ""
    name = f' aria-label="{escape(caption)}"' if caption else ""
    return f'{told}<div class="wide"><table{name}>\n{whole}\n</tbody></table></div>'


def picture(png: bytes, alt: str, caption: str = "", *, chart: bool = False) -> str:
    """A picture within the page.

    Args:
        png: its bytes.
        alt: what it shows, for those who do not see it.
        caption: below it.
        chart: lines on white, which the dark page turns over; a photo's colours stay.

    Returns:
        HTML.

    Example:
        >>> "data:image/png;base64,UE5H" in picture(b"PNG", "a plot", chart=True)
        True
    """
    data = base64.b64encode(png).decode()
    told = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    kind = "chart wide" if chart else "photo"
    return f'<figure class="{kind}"><img src="data:image/png;base64,{data}" alt="{escape(alt)}">{told}</figure>'


def listing(pairs: Sequence[tuple[str, str]]) -> str:
    """Words and what they stand for.

    Args:
        pairs: plain text.

    Returns:
        HTML.

    Example:
        >>> listing([("seen", "224 px")])
        '<dl><dt>seen</dt><dd>224 px</dd></dl>'
    """
    return f"<dl>{''.join(f'<dt>{escape(word)}</dt><dd>{escape(text)}</dd>' for word, text in pairs)}</dl>"


def folded(summary: str, inside: str, *, opened: bool = False) -> str:
    """What opens and closes on a click.

    Args:
        summary: plain text that stays.
        inside: HTML.
        opened: whether it is open at first.

    Returns:
        HTML.

    Example:
        >>> folded("more", "<p>a</p>")
        '<details><summary>more</summary><p>a</p></details>'
    """
    return f"<details{' open' if opened else ''}><summary>{escape(summary)}</summary>{inside}</details>"
