import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from selectivit.data.transforms import MAX_PATCHES, target_size, to_picture, to_tensor

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def photo(width, height, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)


@settings(derandomize=True, max_examples=300, deadline=None)
@given(
    width=st.integers(1, 20_000),
    height=st.integers(1, 20_000),
    patch=st.sampled_from([1, 8, 14, 16, 32]),
    size=st.none() | st.integers(1, 2048),
    bound=st.integers(1, 20_000),
)
def test_any_size_becomes_whole_patches_within_the_bound(width, height, patch, size, bound):
    target = target_size((width, height), patch_size=patch, size=size, max_patches=bound)
    rows, columns = target.height / patch, target.width / patch
    assert rows == int(rows) >= 1 and columns == int(columns) >= 1
    assert rows * columns <= bound
    scale = 1 if size is None else size / min(width, height)
    if not target.notes:
        assert abs(target.height - height * scale) <= max(patch / 2 + 1e-6, patch - height * scale)
        assert abs(target.width - width * scale) <= max(patch / 2 + 1e-6, patch - width * scale)
    else:
        assert max(1, round(height * scale / patch)) * max(1, round(width * scale / patch)) > bound
        assert f"{target.width} x {target.height}" in target.notes[0] and str(bound) in target.notes[0]


def test_a_huge_picture_is_scaled_down_and_this_is_said():
    target = target_size((10_000, 10_000), patch_size=14)
    assert target.height == target.width == 1792 and (1792 // 14) ** 2 == MAX_PATCHES
    assert target.notes == ("9996 x 9996 px would be 509796 patches, more than 16384: scaled down to 1792 x 1792 px",)


def test_a_strip_keeps_its_long_side_as_far_as_the_bound_allows():
    target = target_size((100_000, 1), patch_size=14, max_patches=100)
    assert (target.height, target.width) == (14, 1400)


def test_one_pixel_becomes_one_patch():
    tensor = to_tensor(Image.new("RGB", (1, 1), (255, 0, 0)), mean=(0, 0, 0), std=(1, 1, 1), patch_size=14)
    torch.testing.assert_close(tensor, torch.tensor([1.0, 0, 0]).view(3, 1, 1).expand(3, 14, 14).contiguous())


def test_whole_patches_pass_unscaled_and_are_normalised():
    image = photo(56, 28)
    tensor = to_tensor(image, mean=MEAN, std=STD, patch_size=14)
    expected = (np.asarray(image) / 255 - np.array(MEAN)) / np.array(STD)
    assert tensor.dtype == torch.float32 and tensor.is_contiguous()
    np.testing.assert_allclose(tensor.permute(1, 2, 0).numpy(), expected, atol=1e-6)


def test_the_shorter_side_gets_the_size_and_the_aspect_is_kept():
    assert to_tensor(photo(300, 200), mean=MEAN, std=STD, patch_size=14, size=140).shape == (3, 140, 210)
    assert to_tensor(photo(200, 300), mean=MEAN, std=STD, patch_size=14, size=140).shape == (3, 210, 140)


def test_scaling_antialiases():
    board = np.indices((512, 512)).sum(0) % 2 * 255
    image = Image.fromarray(np.repeat(board[..., None], 3, 2).astype(np.uint8))
    small = to_picture(image, patch_size=14, size=70).astype(float)
    assert abs(small.mean() - 127.5) < 1 and small.std() < 3


def test_large_pictures_are_scaled_as_small_ones_are():
    image = photo(2100, 1400)
    small = to_picture(image, patch_size=14, size=140).astype(float)
    exact = np.asarray(image.resize((210, 140), Image.Resampling.BICUBIC), float)
    assert small.shape == exact.shape and np.abs(small - exact).max() <= 4


def test_the_shown_picture_is_the_tensor_before_normalisation():
    image = photo(123, 77)
    shown = to_picture(image, patch_size=14, size=90)
    tensor = to_tensor(image, mean=MEAN, std=STD, patch_size=14, size=90)
    back = tensor.permute(1, 2, 0).numpy() * np.array(STD) + np.array(MEAN)
    assert shown.dtype == np.uint8 and shown.flags.writeable
    np.testing.assert_allclose(back * 255, shown, atol=1e-3)


def test_the_result_is_the_same_every_time_and_the_picture_untouched():
    image = photo(321, 123)
    before = image.tobytes()
    first, second = (to_tensor(image, mean=MEAN, std=STD, patch_size=16, size=64) for _ in range(2))
    assert torch.equal(first, second) and image.tobytes() == before


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"patch_size": 0}, "patch_size of at least 1, got 0"),
        ({"size": 0}, "size of at least 1, got 0"),
        ({"max_patches": -1}, "max_patches of at least 1, got -1"),
        ({"std": (1, 0, 1)}, "positive stds"),
        ({"mean": (0.5,)}, "three means"),
    ],
)
def test_wrong_arguments_are_named(change, expected):
    with pytest.raises(ValueError, match=expected):
        to_tensor(photo(20, 20), **{"mean": MEAN, "std": STD, "patch_size": 14, **change})


def test_a_picture_that_is_not_rgb_is_refused():
    with pytest.raises(ValueError, match="expected an RGB picture, got mode 'L'"):
        to_picture(Image.new("L", (20, 20)), patch_size=14)
