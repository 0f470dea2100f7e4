"""Crops for training: a function of the seed and the sample's number, whatever else draws random numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from selectivit.data.images import ImageError
from selectivit.data.photos import PhotoFiles
from selectivit.data.seeding import derived_seed, seeded
from selectivit.data.training_images import (
    Sample,
    TrainingImages,
    centre_crops,
    collate,
    crop_transform,
    epoch_order,
    less_elongated,
)


@pytest.fixture
def photos(tmp_path):
    paths = []
    for i in range(5):
        path = tmp_path / f"{i}.png"
        noise = torch.randint(0, 256, (40, 50, 3), generator=torch.Generator().manual_seed(i)).to(torch.uint8)
        Image.fromarray(noise.numpy()).save(path)
        paths.append(str(path))
    return PhotoFiles(paths)


def test_a_sample_is_the_same_however_it_is_reached(photos):
    one, other = TrainingImages(photos, seed=3), TrainingImages(photos, seed=3)
    wanted = [one[Sample(number, 28)].image for number in range(12)]
    torch.manual_seed(123)
    for number in (7, 2, 11):
        torch.rand(number)
        assert torch.equal(other[Sample(number, 28)].image, wanted[number])
    assert wanted[0].shape == (3, 28, 28) and wanted[0].dtype == torch.uint8
    assert not all(torch.equal(TrainingImages(photos, seed=4)[Sample(i, 28)].image, wanted[i]) for i in range(3))


def test_drawing_a_sample_leaves_the_callers_numbers_alone(photos):
    torch.manual_seed(0)
    wanted = torch.rand(3)
    torch.manual_seed(0)
    TrainingImages(photos, seed=0)[Sample(0, 14)]
    assert torch.equal(torch.rand(3), wanted)


def test_every_photo_comes_once_an_epoch_each_time_otherwise(photos):
    orders = [epoch_order(5, 0, epoch).tolist() for epoch in range(6)]
    assert all(sorted(order) == list(range(5)) for order in orders) and len(set(map(tuple, orders))) > 1


def test_without_augmentation_crops_are_pieces_of_the_photo(tmp_path):
    Image.new("RGB", (60, 40), (9, 8, 7)).save(tmp_path / "a.png")
    images = TrainingImages(PhotoFiles([str(tmp_path / "a.png")]), 0, augment=False)
    assert all((images[Sample(i, 28)].image == torch.tensor([9, 8, 7]).view(3, 1, 1)).all() for i in range(8))
    augmented = TrainingImages(PhotoFiles([str(tmp_path / "a.png")]), 0)
    assert not all((augmented[Sample(i, 28)].image == torch.tensor([9, 8, 7]).view(3, 1, 1)).all() for i in range(8))


def test_the_next_photo_of_the_epoch_stands_in_for_one_that_cannot_be_read(photos, tmp_path):
    bad = epoch_order(5, 0, 0)[1]
    (tmp_path / f"{bad}.png").write_bytes(b"no photo")
    images = TrainingImages(photos, 0, augment=False)
    found = images[Sample(1, 14)]
    assert found.number == 1 and found.image.shape == (3, 14, 14)
    assert [name for name, _ in found.skipped] == [photos.name(bad)]
    batch = collate([images[Sample(i, 14)] for i in range(5)])
    assert (
        batch.images.shape == (5, 3, 14, 14) and batch.first == 0 and dict(batch.skipped).keys() == {photos.name(bad)}
    )


def test_no_readable_photo_is_an_error(tmp_path):
    (tmp_path / "a.png").write_bytes(b"no photo")
    with pytest.raises(ImageError, match="none of the 1 photos can be read"):
        TrainingImages(PhotoFiles([str(tmp_path / "a.png")]), 0)[Sample(0, 14)]
    with pytest.raises(ValueError, match="no photo to train on"):
        TrainingImages(PhotoFiles([]), 0)


@given(st.integers(1, 3), st.integers(1, 3000), st.booleans())
def test_photos_of_any_shape_give_crops(short, longer, turned):
    size = (short, longer) if turned else (longer, short)
    cut = less_elongated(Image.new("RGB", size))
    assert max(cut.size) <= max(4 * min(cut.size), min(size)) and min(cut.size) == min(size)
    assert crop_transform(14, True)(Image.new("RGB", size)).shape == (3, 14, 14)


def test_centre_crops(photos, tmp_path):
    (tmp_path / "3.png").write_bytes(b"no photo")
    crops, skipped = centre_crops(photos, [0, 3, 4], 20)
    assert [tuple(crop.shape) for crop in crops] == [(3, 20, 20)] * 2 and skipped[0][0].endswith("3.png")
    assert torch.equal(centre_crops(photos, range(3, 5), 20, at_most=1)[0][0], crops[1])


def test_seeds():
    seeds = {derived_seed(seed, what, step) for seed in range(3) for what in ("a", "b") for step in range(50)}
    assert len(seeds) == 300 and all(0 <= seed < 2**32 for seed in seeds)
    assert derived_seed(1, 23) != derived_seed(12, 3)
    with seeded(5):
        a = torch.rand(2)
    torch.rand(1)
    with seeded(5):
        assert torch.equal(torch.rand(2), a)
