"""docs/benchmarks.md is what the JSON results say, and stays short enough to read."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "benchmarks.md"
LONGEST = 14  # rows with the title's two lines


def test_the_page_is_what_the_results_say():
    code = "import write_page; print(write_page.page(), end='')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT / "benchmarks",
        capture_output=True,
        check=True,
        env={**os.environ, "PYTHONUTF8": "1"},
    )
    assert done.stdout.decode() == PAGE.read_text(encoding="utf-8"), "write it again: python benchmarks/write_page.py"


def test_every_result_has_a_section_and_a_command():
    page = PAGE.read_text(encoding="utf-8")
    for section in page.split("\n## ")[1:]:
        assert re.search(r"^`.+`$", section, re.MULTILINE), section.splitlines()[0]
        assert sum(line.startswith("|") for line in section.splitlines()) <= LONGEST, section.splitlines()[0]
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        assert f"(../benchmarks/results/{path.name})" in page
