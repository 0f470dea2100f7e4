"""Build hook: the repository's files that pages link to become part of the site, and LaTeX becomes MathML.

So the same Markdown reads well on a code host (which shows files outside docs/ and renders LaTeX) and in a site that is
built and read without a network.
"""

from __future__ import annotations

import html
import re
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
OUTSIDE = re.compile(r"(?<=\]\()\.\./([^)#\s]+)")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def on_files(files, config):
    """Add what pages link to outside docs/, at its path in the repository."""
    wanted: set[str] = set()
    for page in files.documentation_pages():
        wanted |= set(OUTSIDE.findall(Path(page.abs_src_path).read_text(encoding="utf-8")))
    for target in sorted(wanted):
        if (ROOT / target).is_file():  # what is no file stays a broken link, which the strict build reports
            files.append(File.generated(config, target, abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Point `](../x)` of a page of docs/ at the copy of x."""
    return OUTSIDE.sub(r"\1", markdown) if "/" not in page.file.src_uri else markdown


def on_page_content(content, page, config, files):
    """Write every formula as MathML, which browsers draw themselves."""
    return FORMULA.sub(_mathml, content)


def _mathml(found: re.Match[str]) -> str:
    tag, bracket, latex = found.groups()
    display = "block" if bracket == "[" else "inline"
    return f'<{tag} class="formula">{convert(html.unescape(latex).strip(), display=display)}</{tag}>'
