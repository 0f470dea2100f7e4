"""Views of photos, against torchvision's own transforms, and crops of photos with their labels."""

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms

from selectivit.data.dense_crops import CropSettings, dense_crop
from selectivit.data.views import View, check_whole_patches

MODEL = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225), "patch_size": 8}


def noise(height=50, width=70, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def test_the_middle_crop_is_dinos():
    expected = transforms.Compose(
        [
            transforms.Resize(36, interpolation=transforms.InterpolationMode.BICUBIC),
            transforms.CenterCrop(32),
            transforms.ToTensor(),
            transforms.Normalize(MODEL["mean"], MODEL["std"]),
        ]
    )
    image = noise()
    torch.testing.assert_close(View("centre", 32, resize=36)(image, 0, **MODEL), expected(image))


def test_random_views_differ_by_number_and_photo_and_repeat():
    image, views = noise(), [View("random", 32, number=n) for n in (0, 1)]
    first = views[0](image, 3, **MODEL)
    assert first.shape == (3, 32, 32) and torch.equal(first, views[0](image, 3, **MODEL))
    assert not torch.equal(first, views[1](image, 3, **MODEL)) and not torch.equal(first, views[0](image, 4, **MODEL))
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    views[0](image, 3, **MODEL)
    assert torch.equal(torch.rand(2), expected)  # who draws outside is not disturbed


def test_a_crop_that_does_not_fit_the_patches():
    with pytest.raises(ValueError, match=r"224 px does not fit the model's patches of 15 px.*such as 210 or 225"):
        check_whole_patches(224, 15)
    with pytest.raises(ValueError, match="does not fit"):
        View("random", 30)(noise(), 0, **MODEL)
    with pytest.raises(ValueError, match="expected a view of"):
        View("left", 30)


def coded(height, width):
    """A photo whose red and green are row and column, and the same as labels."""
    rows, columns = np.mgrid[:height, :width]
    image = np.stack([rows, columns, np.zeros_like(rows)], -1).astype(np.uint8)
    return Image.fromarray(image), torch.from_numpy(rows * 1000 + columns)


def test_crops_and_labels_stay_together(monkeypatch):
    monkeypatch.setattr("selectivit.data.dense_crops._colours", lambda: lambda pixels: pixels)
    image, labels = coded(60, 80)
    flipped = set()
    for seed in range(8):
        crop, cut = dense_crop(image, labels, CropSettings((24, 32)), seed)
        pixels = (crop * 255).round().long()
        assert torch.equal(pixels[0] * 1000 + pixels[1], cut)
        flipped.add(bool(cut[0, 0] > cut[0, -1]))
        again = dense_crop(image, labels, CropSettings((24, 32)), seed)
        assert torch.equal(again[0], crop) and torch.equal(again[1], cut)
    assert flipped == {True, False}


def test_scaled_crops_follow_their_labels(monkeypatch):
    monkeypatch.setattr("selectivit.data.dense_crops._colours", lambda: lambda pixels: pixels)
    image, labels = coded(60, 80)
    for seed in range(6):
        crop, cut = dense_crop(image, labels, CropSettings((32, 32), (0.5, 2.0)), seed)
        seen = cut != 255
        rows = crop[0] * 255
        assert (rows - cut // 1000)[seen].abs().max() < 3


def test_small_photos_are_filled_with_void():
    crop, cut = dense_crop(Image.new("RGB", (10, 8)), torch.ones(8, 10, dtype=torch.uint8), CropSettings((16, 16)), 0)
    assert crop.shape == (3, 16, 16) and int((cut == 255).sum()) == 256 - 80 and int((cut == 1).sum()) == 80


def test_crops_of_one_label_are_drawn_anew():
    labels = torch.zeros(40, 400, dtype=torch.uint8)
    labels[:, 390:] = 1
    image = Image.new("RGB", (400, 40))
    varied = sum(len(dense_crop(image, labels, CropSettings((40, 40), most=0.9), s)[1].unique()) > 1 for s in range(20))
    plain = sum(len(dense_crop(image, labels, CropSettings((40, 40)), s)[1].unique()) > 1 for s in range(20))
    assert varied > plain
