"""Depth data: every layout on generated folders, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from depth_folders import SIZE, kitti, metres, numbers, nyu, own, photo, sun
from PIL import Image

from selectivit.data.depth import DepthError, DepthLayoutError, open_depth


@pytest.mark.parametrize("lists", [True, False])
def test_nyu(tmp_path, lists):
    nyu(tmp_path, lists)
    train, val = (open_depth(tmp_path, split=split) for split in ("train", "val"))
    assert (train.name, len(train), len(val), val.split) == ("nyu", 3, 2, "test")
    for i in range(2):
        name = "test" + val.name_of(i)[-1]
        assert float(val.depth(i).max()) == pytest.approx(metres(name)) and val.image(i).size == (SIZE[1], SIZE[0])
    assert val.max_depth == 10 and val.units == 1000


def test_sun_rgbd_turns_the_three_low_bits_back(tmp_path):
    sun(tmp_path)
    data = open_depth(tmp_path, split="val")
    assert (data.name, len(data), len(open_depth(tmp_path, split="all"))) == ("sunrgbd", 2, 3)
    for i in range(2):
        assert float(data.depth(i).min()) == pytest.approx(metres(f"scene{i}"))
    with pytest.raises(DepthLayoutError, match="has no list of the split 'train'"):
        open_depth(tmp_path, split="train")


def test_sun_rgbd_in_a_folder_of_its_name(tmp_path):
    sun(tmp_path / "SUNRGBD", lists=False)
    assert len(open_depth(tmp_path, split="all")) == 3
    (tmp_path / "SUNRGBD/kv1/NYUdata/scene0/image/a.jpg").unlink()
    with pytest.raises(DepthLayoutError, match="expected one photo in image/"):
        open_depth(tmp_path, split="all")


@pytest.mark.parametrize("lists", [True, False])
def test_kitti_is_cut_to_its_benchmark(tmp_path, lists):
    kitti(tmp_path, lists)
    data = open_depth(tmp_path, split="val")
    assert (data.name, len(data), data.max_depth) == ("kitti", 2, 80)
    depth = data.depth(0)
    assert depth.shape == (352, 1216) and data.image(0).size == (1216, 352)
    whole = np.zeros((360, 1220), dtype=np.float32)
    whole[100::4, 3::5] = 12.5
    assert np.array_equal(depth.numpy(), whole[8:, 2:1218])
    assert np.array_equal(np.asarray(data.image(0)), np.asarray(Image.open(data.pairs[0][1]))[8:, 2:1218])
    assert bool(data.notes) == lists


@pytest.mark.parametrize("kind", ["two folders", "split first", "side by side"])
def test_own_folder_with_splits(tmp_path, kind):
    own(tmp_path, kind)
    train, val = (open_depth(tmp_path, split=split) for split in ("train", "val"))
    assert (train.name, len(train), len(val)) == ("folder", 6, 3)
    assert [float(val.depth(i)[0, 0]) for i in range(3)] == pytest.approx([metres(f"val{i}") for i in range(3)])
    with pytest.raises(DepthLayoutError, match="has no split 'night'"):
        open_depth(tmp_path, split="night")


@pytest.mark.parametrize("kind", ["no splits", "no splits, two folders"])
def test_own_folder_without_splits(tmp_path, kind):
    own(tmp_path, kind)
    data = open_depth(tmp_path, split="all")
    assert len(data) == 9 and data.split == "all"
    with pytest.raises(DepthLayoutError, match="has no split 'train'"):
        open_depth(tmp_path, split="train")


def test_units_and_what_is_no_depth(tmp_path):
    own(tmp_path, "side by side")
    values = np.full(SIZE, 2000)
    values[0], values[1], values[2], values[3] = 0, 65535, 11_000, 1
    numbers(tmp_path / "val" / "0.depth.png", values)
    depth = open_depth(tmp_path).depth(0)
    assert (depth[:3] == 0).all() and (depth[3] == 0.001).all() and (depth[4:] == 2).all()
    assert (open_depth(tmp_path, units=5000).depth(0)[4:] == 0.4).all()
    with pytest.raises(DepthLayoutError, match="units above 0"):
        open_depth(tmp_path, units=0)


@pytest.mark.parametrize(("value", "told"), [(0, "holds 0 everywhere"), (65535, "holds 65535 everywhere")])
def test_no_depth_at_all(tmp_path, value, told):
    own(tmp_path, "side by side")
    numbers(tmp_path / "val" / "1.depth.png", value)
    data = open_depth(tmp_path)  # one bad map is told when its turn comes
    with pytest.raises(DepthError, match=told):
        data.depth(1)
    for i in range(3):
        numbers(tmp_path / "val" / f"{i}.depth.png", value)
    with pytest.raises(DepthError, match=told):
        open_depth(tmp_path)


def test_depth_outside_the_range_hints_at_the_units(tmp_path):
    own(tmp_path, "side by side")
    with pytest.raises(DepthError, match="check --units"):
        open_depth(tmp_path, units=0.1)


def test_photos_and_maps_that_do_not_pair(tmp_path):
    own(tmp_path, "two folders")
    (tmp_path / "depth/val/1.png").unlink()
    with pytest.raises(DepthLayoutError, match="no counterpart, such as '1', a photo without a depth map"):
        open_depth(tmp_path)
    nyu(tmp_path / "nyu")
    (tmp_path / "nyu/test/room_0/sync_depth_test0.png").unlink()
    with pytest.raises(DepthLayoutError, match=r"1 files that .*nyu_test.txt lists are missing, such as"):
        open_depth(tmp_path / "nyu")


def test_other_sizes_and_kinds_of_files(tmp_path):
    own(tmp_path, "side by side")
    photo(tmp_path / "val/0.color.jpg", (10, 12))
    data = open_depth(tmp_path)
    with pytest.raises(DepthError, match=r"has 32 x 24 pixels and its photo .* 12 x 10"):
        data.depth(0)
    Image.new("RGB", (SIZE[1], SIZE[0])).save(tmp_path / "val/1.depth.png")
    with pytest.raises(DepthError, match="is of mode RGB: expected one channel of 16 bits"):
        data.depth(1)
    (tmp_path / "val/2.depth.png").write_bytes(b"no picture")
    with pytest.raises(DepthError, match="cannot be read as a depth map"):
        data.depth(2)


def test_folders_that_are_none(tmp_path):
    with pytest.raises(DepthLayoutError, match="is no folder"):
        open_depth(tmp_path / "none")
    with pytest.raises(DepthLayoutError, match="did you mean 'kitti'"):
        open_depth(tmp_path, "kiti")
    with pytest.raises(DepthLayoutError, match="holds no photos with depth maps"):
        open_depth(tmp_path, split="all")
    (tmp_path / "nyu_test.txt").write_text("only-one-name\n")
    with pytest.raises(DepthLayoutError, match="line 1: expected a photo and a depth map"):
        open_depth(tmp_path)
