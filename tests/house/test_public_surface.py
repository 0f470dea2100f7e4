"""What the package offers, and that every public name is documented with an example that runs."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch

import selectivit as sv

ROOT = Path(__file__).parents[2]
SURFACE = {
    "Calibration",
    "Features",
    "OpenVocabularySegmenter",
    "Segmentation",
    "Swap",
    "__version__",
    "attention_maps",
    "calibrate_swap",
    "core_attention",
    "create_model",
    "entmax",
    "entmax15",
    "entmax_attention",
    "entmax_loss",
    "export_features",
    "features",
    "list_models",
    "load_image",
    "load_model",
    "preprocessing",
    "restore_attention",
    "sparsemax",
    "swap_attention",
}
MODULES = sorted(
    "selectivit." + ".".join(p.relative_to(ROOT / "src" / "selectivit").with_suffix("").parts)
    for p in (ROOT / "src" / "selectivit").rglob("*.py")
    if p.name != "__init__.py"
)


def test_surface():
    assert set(sv.__all__) == SURFACE and len(SURFACE) <= 40
    assert all(hasattr(sv, name) for name in SURFACE)


def test_version_is_the_one_of_the_project_and_its_citation():
    assert f'version = "{sv.__version__}"' in (ROOT / "pyproject.toml").read_text()
    assert f"version: {sv.__version__}" in (ROOT / "CITATION.cff").read_text()


@pytest.mark.parametrize("name", sorted(n for n in SURFACE if callable(getattr(sv, n, None))))
def test_every_public_function_says_what_it_takes_and_shows_it(name):
    thing = getattr(sv, name)
    text = inspect.getdoc(thing) or ""
    parameters = inspect.signature(thing).parameters
    if parameters and inspect.isfunction(thing):
        assert "Args:" in text and "Example:" in text and ">>>" in text
        undocumented = [p for p in parameters if not re.search(rf"^\s+{p}:", text, re.MULTILINE)]
        assert not undocumented, f"{name} does not document {undocumented}"


@pytest.mark.parametrize("name", MODULES)
def test_doc_examples_run(name):
    if name.startswith("selectivit.ops.kernels.triton_") and not name.endswith("_plan"):
        pytest.importorskip("triton", reason="the Triton kernels' files are read where Triton is installed")
    module = importlib.import_module(name)
    torch.manual_seed(0)
    result = doctest.testmod(module, extraglobs={"torch": torch}, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0
