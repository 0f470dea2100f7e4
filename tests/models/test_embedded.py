"""The models whose weights come with the package."""

from __future__ import annotations

import re

import pytest
import torch
from PIL import Image

import selectivit as sv
from selectivit.data.transforms import to_tensor
from selectivit.models.names import EMBEDDED

MEGABYTES = 12


@pytest.mark.parametrize("name", EMBEDDED)
def test_it_is_small_and_has_a_card(name):
    files = {path.name: path for path in EMBEDDED[name].iterdir()}
    assert sum(path.stat().st_size for path in files.values()) < MEGABYTES * 1e6
    card = files["README.md"].read_text()
    assert all(f"## {section}" in card for section in ("Use", "Command", "Data", "Numbers (measured here)", "Terms"))
    assert not re.search(r"/(tmp|work|home|root)/", card)


def photo(size):
    prepared = sv.preprocessing(sv.load_model("veca-tiny"))
    with Image.open("examples/astronaut.jpg") as image:
        return to_tensor(
            image.convert("RGB"), mean=prepared.mean, std=prepared.std, patch_size=prepared.patch_size, size=size
        )[None]


@pytest.fixture(scope="module")
def veca():
    return sv.load_model("veca-tiny")


def test_veca_tiny_is_a_veca_in_float32(veca):
    assert not veca.training and next(veca.parameters()).dtype is torch.float32
    assert veca.config.num_cores == 64 and veca.config.patch_size == 14 and veca.config.out_dim == 384


def test_its_budgets_agree_as_trained_ones_do(veca):
    image = photo(224)
    with torch.inference_mode():
        full = sv.features(veca, image).map
        others = {cores: sv.features(veca, image, num_cores=cores).map for cores in (1, 8, 32)}
    near = {cores: torch.cosine_similarity(other, full).mean() for cores, other in others.items()}
    assert near[1] < near[8] < near[32] and near[8] > 0.95


def test_its_features_follow_a_mirrored_photo(veca):
    """Random weights reach 0.61."""
    image = photo(224)
    with torch.inference_mode():
        plain, mirrored = sv.features(veca, image).map, sv.features(veca, image.flip(-1)).map
    assert torch.cosine_similarity(plain, mirrored.flip(-1)).mean() > 0.8


@pytest.mark.network
def test_its_patches_are_near_the_teachers(veca):
    image = photo(224)
    with torch.inference_mode():
        student = veca(image).projected_patches
        teacher = sv.features(sv.load_model("dinov2-small"), image).patch_tokens
    assert torch.cosine_similarity(student, teacher, dim=-1).mean() > 0.7
