"""README and docs: Python blocks run, links lead somewhere, figures quote the JSON results that stand beside them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from documents import PAGES, ROOT, blocks
from safetensors.torch import save_file

import selectivit as sv
from selectivit.models.names import EMBEDDED


def python_blocks(path: Path) -> list[str]:
    return blocks(path.read_text(), "python")


def small_clip(name, **_):
    """A random CLIP of six blocks with CLIP's own tokenizer."""
    open_clip = pytest.importorskip("open_clip")
    torch.manual_seed(0)
    vision = {"image_size": 64, "patch_size": 16, "width": 48, "layers": 6, "head_width": 16}
    model = open_clip.model.CLIP(32, vision, {"width": 48, "heads": 3, "layers": 2}, quick_gelu=True)
    return model.eval(), open_clip.get_tokenizer("ViT-B-16")


@pytest.mark.parametrize("path", [p for p in PAGES if python_blocks(p)], ids=lambda p: p.name)
def test_python_blocks_run(path, monkeypatch, tmp_path):
    """All blocks of a page in order in one namespace; weights and feature files are replaced by small random ones."""
    timm = pytest.importorskip("timm")
    (tmp_path / "features" / "street").mkdir(parents=True)
    save_file({"map": torch.randn(8, 2, 3)}, tmp_path / "features" / "street" / "a.safetensors")

    load = sv.load_model

    def small(name, **_):
        if name in EMBEDDED:
            return load(name)
        torch.manual_seed(0)
        model = timm.models.VisionTransformer(
            img_size=56, patch_size=14, embed_dim=48, depth=5, num_heads=3, num_classes=0, dynamic_img_size=True
        )
        for block in model.blocks:  # scores as wide as a trained model's, which a calibration has to narrow
            torch.nn.init.normal_(block.attn.qkv.weight, std=0.3)
        return model.eval()

    monkeypatch.setattr(sv, "load_model", small)
    monkeypatch.setattr("selectivit.models.clip.load_clip", small_clip)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in python_blocks(path):
        exec(compile(block, str(path), "exec"), names)


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#]+)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_the_files_that_the_map_of_the_papers_names_are_there():
    named = re.findall(r"`([\w/]+\.py)`", (ROOT / "docs" / "papers.md").read_text())
    assert len(named) > 40
    for name in named:
        assert (ROOT / name if name.startswith("examples/") else ROOT / "src" / "selectivit" / name).is_file(), name


def test_the_reference_has_every_public_name():
    entries = re.findall(r"^::: selectivit\.(.+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    named = [entry.rpartition(".")[2] for entry in entries]  # features.features: the function, not its module
    assert sorted(named) == sorted(set(sv.__all__) - {"__version__"})
