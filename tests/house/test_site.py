"""The site: built with warnings as errors, complete, asking no other server; a new result makes its own section."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location

import pytest
from documents import PAGES, ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs", reason='pip install "selectivit[docs]" builds the site')
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(target)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target


def test_every_page_is_in_the_site_and_in_its_menu(site):
    menu = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    for path in (ROOT / "docs").glob("*.md"):
        assert (site / path.with_suffix(".html").name).is_file()
        assert re.search(rf"[ :-] {re.escape(path.name)}$", menu, re.MULTILINE), (
            f"{path.name} is not in mkdocs.yml's nav"
        )


def test_pages_load_nothing_from_elsewhere(site):
    for path in site.rglob("*.html"):
        html = path.read_text()
        assert not re.findall(r'<(?:script|img|link|iframe)[^>]+(?:src|href)="(?:https?:)?//[^"]+"', html), path.name


def test_formulas_are_mathml_and_linked_results_are_there(site):
    page = (site / "entmax.html").read_text()
    assert "<math" in page and "arithmatex" not in page
    for path in site.glob("*.html"):
        for formula in re.findall(r"<math.*?</math>", path.read_text(), re.DOTALL):
            assert "\\" not in formula, f"{path.name}: a command is left as it is in {formula}"
    assert json.loads((site / "benchmarks" / "results" / "entmax_rows.json").read_text())["rows"]


def writer():
    spec = spec_from_file_location("write_page", ROOT / "benchmarks" / "write_page.py")
    assert spec and spec.loader
    module = module_from_spec(spec)
    sys.modules["write_page"] = module
    spec.loader.exec_module(module)
    return module


def test_a_new_result_appears_by_itself(monkeypatch, tmp_path):
    module = writer()
    rows = [{"card": "X", "ratio": 0.5, "seconds": {"a": 1}}, {"card": "Y", "deep": {"ms": 123.4}}]
    machine = {"gpu": "G", "torch": "2", "cores": 1, "threads": 1}
    (tmp_path / "new.json").write_text(json.dumps({"question": "how fast", "machine": machine, "rows": rows}))
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    page = module.page()
    assert "How fast." in page and "Machine: G, 1 threads on 1 cores, torch 2." in page
    assert "| card | ratio | deep, ms |" in page and "| X | 0.5 | – |" in page and "| Y | – | 123 |" in page


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_outer_links_are_well_formed(path):
    for link in re.findall(r"\]\((\w+://[^)\s]*)\)", path.read_text()):
        assert re.fullmatch(r"https://[a-z0-9-]+(\.[a-z0-9-]+)+(/[\w.~%/#?=&+-]*)?", link), f"{path.name}: {link}"
