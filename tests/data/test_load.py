"""`load_image`: a photo's file to a model's batch of one."""

import sys

import pytest
import torch
from PIL import Image

import selectivit as sv
from selectivit.swap.sites import Preprocessing

EXPECTED = Preprocessing(mean=(0.5,) * 3, std=(0.25,) * 3, patch_size=14, image_size=(224, 224))


def test_a_photo_becomes_a_normalised_batch_of_whole_patches(tmp_path):
    Image.new("RGB", (300, 200), (255, 0, 0)).save(tmp_path / "a.png")
    image = sv.load_image(tmp_path / "a.png", EXPECTED)
    assert image.shape == (1, 3, 224, 336) and image.dtype == torch.float32
    assert image[0, :, 5, 5].tolist() == [2.0, -2.0, -2.0]
    assert sv.load_image(tmp_path / "a.png", EXPECTED, size=28).shape == (1, 3, 28, 42)


def test_bad_input_is_named(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="does not exist"):
        sv.load_image(tmp_path / "b.png", EXPECTED)
    Image.new("RGB", (30, 20)).save(tmp_path / "a.png")
    with pytest.raises(ValueError, match="size"):
        sv.load_image(tmp_path / "a.png", EXPECTED, size=0)
    monkeypatch.setitem(sys.modules, "selectivit.data.images", None)
    with pytest.raises(ImportError, match="needs Pillow"):
        sv.load_image(tmp_path / "a.png", EXPECTED)
