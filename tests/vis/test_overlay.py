"""Overlays and index pictures: read back from their files."""

import io

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

from selectivit.vis.overlay import LISTED, LONGEST_SIDE, NO_FONT, index_png, overlay_png, palette


def read(data):
    return Image.open(io.BytesIO(data))


@pytest.mark.parametrize("count", [1, 2, 150, 256])
def test_colours_differ_and_stay_when_classes_are_added(count):
    colours = palette(count, has_background=True)
    assert colours.shape == (count, 3) and colours[0].tolist() == [0, 0, 0]
    assert torch.equal(palette(count + 5, has_background=True)[:count], colours)
    near = torch.cdist(colours[:12].float(), colours[:12].float()) + 1e3 * torch.eye(min(12, count))
    assert near.min() > 30
    assert len({tuple(c) for c in colours.tolist()}) > 0.95 * count


@pytest.mark.parametrize("count", [2, 256, 2000])
def test_index_pictures_hold_the_indices(count):
    index = torch.randint(0, count, (13, 17), dtype=torch.int32)
    index[0, 0] = count - 1
    picture = read(index_png(index, palette(count)))
    assert picture.mode == ("P" if count <= 256 else "I;16")
    assert (np.array(picture) == index.numpy()).all()


def overlay(height=40, width=60, names=("road", "car"), **options):
    index = torch.zeros(height, width, dtype=torch.int32)
    index[:, width // 2 :] = 1
    return overlay_png(torch.full((height, width, 3), 0.5), index, names, **options)


def test_the_photo_is_tinted_in_the_classes_colours():
    pixels = np.array(read(overlay()).convert("RGB")).astype(int)
    colours = palette(2).int().numpy()
    for colour in colours:
        want = (0.45 * 127.5 + 0.55 * colour).round()
        assert ((np.abs(pixels - want).max(-1) <= 2).mean()) > 0.1


def test_background_is_the_pale_photo():
    pixels = np.array(read(overlay(has_background=True)).convert("RGB")).astype(int)
    assert (np.abs(pixels - round(255 * 0.6)).max(-1) <= 2).mean() > 0.1


def test_the_same_input_gives_the_same_bytes():
    assert overlay() == overlay()


def test_names_in_any_script_with_odd_signs():
    names = ["猫 $x^", "_дорога $", "سيارة", "x" * 300]
    index = torch.arange(4).repeat_interleave(10).expand(20, 40)
    assert read(overlay_png(torch.rand(20, 40, 3), index, names, title="a$b_猫.jpg")).width > 500


def test_names_that_no_font_draws_keep_their_number_and_say_so(monkeypatch):
    drawn = []
    monkeypatch.setattr(
        "selectivit.vis.overlay._figure",
        lambda photo, shares, names, *more: drawn.append((names, more[-1])) or Figure(),
    )
    overlay(names=("дорога", "\U000f0000 car"), title="a\U000f0000.jpg")
    assert drawn == [(["дорога", NO_FONT], "a?.jpg")]


def test_many_classes_and_large_photos():
    index = torch.arange(3000 * 40).reshape(40, 3000) % 200
    picture = read(overlay_png(torch.rand(40, 3000, 3), index, [f"class {i}" for i in range(200)]))
    assert picture.width < 3 * LONGEST_SIDE and LISTED < 200


def test_sizes_must_agree():
    with pytest.raises(ValueError, match="one size"):
        overlay_png(torch.rand(4, 4, 3), torch.zeros(4, 5), ["a"])
