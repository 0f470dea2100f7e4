"""DINO's crops: a function of the seed and the sample's number; classes of sub-folders."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("lightly")

from selectivit.data.classes import LabelledCrops, collate_labelled, photo_classes
from selectivit.data.multi_crop import Crops, MultiCropImages, collate_crops, dino_transform
from selectivit.data.photos import PhotoFiles, open_photos
from selectivit.data.training_images import Sample


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("photos")
    for place, name in enumerate(("cat", "cat", "dog", "dog")):
        (root / name).mkdir(exist_ok=True)
        noise = np.random.default_rng(place).integers(0, 256, (60, 80, 3), dtype=np.uint8)
        Image.fromarray(noise).save(root / name / f"{place}.png")
    return root


def test_crops_are_a_function_of_the_sample(folder):
    photos, crops = open_photos([folder])[0], Crops(32, local_size=16, num_local=3)
    numpy_before, torch_before = np.random.get_state()[1].copy(), torch.get_rng_state()
    images = MultiCropImages(photos, 0, crops)
    batch = collate_crops([images[Sample(number, 32)] for number in (4, 5, 6)])
    assert batch.large.shape == (2, 3, 3, 32, 32) and batch.small.shape == (3, 3, 3, 16, 16) and batch.first == 4
    assert batch.large.dtype == torch.uint8
    np.random.seed(9), torch.manual_seed(9)
    alone = collate_crops([MultiCropImages(photos, 0, crops)[Sample(5, 32)]])
    assert torch.equal(alone.large[:, 0], batch.large[:, 1]) and torch.equal(alone.small[:, 0], batch.small[:, 1])
    other = collate_crops([MultiCropImages(photos, 1, crops)[Sample(5, 32)]])
    assert not torch.equal(other.large, alone.large)
    np.random.set_state(("MT19937", numpy_before, 624, 0, 0.0)), torch.set_rng_state(torch_before)


def test_the_generators_are_left_as_they_were(folder):
    images = MultiCropImages(open_photos([folder])[0], 0, Crops(32, local_size=16, num_local=1))
    np.random.seed(3), torch.manual_seed(3)
    wanted = np.random.random_sample(), torch.rand(1)
    np.random.seed(3), torch.manual_seed(3)
    images[Sample(0, 32)]
    assert (np.random.random_sample(), torch.rand(1)) == wanted


def test_the_augmentation_is_dinos():
    """Numbers of the authors' DataAugmentationDINO: scales, flips, colours, blur, solarisation."""
    transforms = dino_transform(Crops()).transforms
    assert len(transforms) == 2 + 8
    views = [view.transform.transforms for view in (transforms[0], transforms[1], transforms[2])]
    for (crop, *_), size, scale in zip(views, (224, 224, 96), ((0.4, 1.0), (0.4, 1.0), (0.05, 0.4)), strict=True):
        assert tuple(crop.size) == (size, size) and tuple(crop.scale) == scale and crop.interpolation.value == "bicubic"
    for view, blur, solarize in zip(views, (1.0, 0.1, 0.5), (0, 0.2, 0), strict=True):
        named = {type(step).__name__: step for step in view}
        assert named["RandomHorizontalFlip"].p == 0.5 and named["RandomGrayscale"].p == 0.2
        assert named["GaussianBlur"].prob == blur and tuple(named["GaussianBlur"].sigmas) == (0.1, 2)
        assert named["RandomSolarization"].prob == solarize
        (colours,) = named["RandomApply"].transforms
        assert named["RandomApply"].p == 0.8
        for name, share in (("brightness", 0.4), ("contrast", 0.4), ("saturation", 0.2)):
            assert getattr(colours, name) == pytest.approx((1 - share, 1 + share))
        assert colours.hue == pytest.approx((-0.1, 0.1))


@pytest.mark.parametrize(
    "wrong", [{"global_size": 0}, {"num_local": -1}, {"global_scale": (0.0, 1.0)}, {"local_scale": (0.5, 0.2)}]
)
def test_crops_that_cannot_be_cut(wrong):
    with pytest.raises(ValueError, match="expected"):
        Crops(**wrong)


def test_photos_are_decoded_large_enough_for_their_smallest_share():
    assert Crops().shorter_side == int(96 / 0.05**0.5)
    assert Crops(num_local=0, local_size=1).shorter_side == int(224 / 0.4**0.5)


def test_sub_folders_are_classes(folder):
    photos, _ = open_photos([folder])
    assert photo_classes(photos, [folder]) == ["cat", "cat", "dog", "dog"]
    assert photo_classes(photos, [str(folder) + "/"]) == ["cat", "cat", "dog", "dog"]
    assert photo_classes(photos, [folder / "cat", folder / "dog"]) is None  # flat folders
    assert photo_classes(open_photos([folder / "cat"])[0], [folder]) is None  # one class
    assert photo_classes(PhotoFiles(["a/b/1.jpg", "2.jpg"]), ["a"]) is None  # one without


def test_labelled_crops_pass_over_what_cannot_be_read(folder, tmp_path):
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"no photo")
    crops = LabelledCrops(PhotoFiles([str(folder / "cat" / "0.png"), str(bad)]), [0, 1], 16)
    assert crops[1][1] is None and "not a picture" in crops[1][2]
    images, labels = collate_labelled([crops[0], crops[1]])
    assert images.shape == (1, 3, 16, 16) and labels.tolist() == [0]
    assert collate_labelled([crops[1]]) is None
