"""The pages, and what stands in their fenced blocks."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "examples" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]


def blocks(text: str, *languages: str) -> list[str]:
    """The fenced blocks of a page in these languages ("" is a fence without one)."""
    fences = re.findall(r"^```([a-z]*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [body for language, body in fences if language in languages]


def commands(text: str) -> list[list[str]]:
    """The arguments of every shell command of a page; lists of usage, with a column of what they do, are none.

    Lines with an ellipsis stand for something that is left out, and are passed over.
    """
    found = []
    for block in blocks(text, "", "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            for part in line.split(" && "):
                usage = re.search(r"\S {3,}[^\s#]", part)
                if re.match(r"(selectivit|torchrun|python) ", part) and "…" not in part and not usage:
                    found.append(shlex.split(part, comments=True))
    return found
