"""Small data sets of depth in the layouts of the benchmarks."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
from PIL import Image

SIZE = (24, 32)


def photo(path: Path, size=SIZE, seed: int = 0, **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path, **options)
    return path


def numbers(path: Path, values) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(
        np.broadcast_to(np.asarray(values, dtype=np.uint16), SIZE).copy()
        if np.ndim(values) == 0
        else np.asarray(values, dtype=np.uint16)
    ).save(path)
    return path


def metres(name: str) -> float:
    """A depth of its own for each name, one to five metres in tenths."""
    return 1 + (zlib.crc32(name.encode()) % 41) / 10


def nyu(root: Path, lists: bool = True) -> Path:
    for split, count in (("train", 3), ("test", 2)):
        lines = []
        for i in range(count):
            scene = f"room_{i % 2}"
            base = root / split / scene if not lists else root / scene if split == "train" else root / "test" / scene
            rgb, depth = base / f"rgb_{split}{i}.jpg", base / f"sync_depth_{split}{i}.png"
            photo(rgb, seed=i)
            numbers(depth, round(1000 * metres(f"{split}{i}")))
            below = root / "test" if lists and split == "test" else root
            lines.append(f"/{rgb.relative_to(below)} /{depth.relative_to(below)} 518.8579")
        if lists:
            (root / f"nyu_{split}.txt").write_text("\n".join(lines) + "\n")
    return root


def sun(root: Path, lists: bool = True) -> Path:
    lines = []
    for i, sensor in enumerate(("kv1/NYUdata", "kv2/align", "xtion/sun3d")):
        scene = root / sensor / f"scene{i}"
        photo(scene / "image" / "a.jpg", seed=i)
        value = round(1000 * metres(f"scene{i}"))
        numbers(scene / "depth_bfx" / "a.png", (value << 3) & 0xFFFF | value >> 13)
        lines.append(f"{sensor}/scene{i}/image/a.jpg {sensor}/scene{i}/depth_bfx/a.png")
    if lists:
        (root / "SUNRGBD_test_splits.txt").write_text("\n".join(lines[:2]) + "\n")
    return root


KITTI_SIZE = (360, 1220)


def kitti(root: Path, lists: bool = True) -> Path:
    depth = np.zeros(KITTI_SIZE, dtype=np.uint16)
    depth[100::4, 3::5] = round(256 * 12.5)
    for split in ("train", "val"):
        lines = []
        for i in range(2):
            drive = f"2011_09_2{i}_drive_000{i}_sync"
            below = f"2011_09_2{i}/{drive}/image_02/data/000{i}{split}.png"
            photo((root / "input" if lists else root) / below, KITTI_SIZE, seed=i)
            map_ = f"{drive}/proj_depth/groundtruth/image_02/000{i}{split}.png"
            numbers((root / "gt_depth" if lists else root / split) / map_, depth)
            lines.append(f"{below} {map_} 721.5377")
        if lists:
            name = "test" if split == "val" else split
            lines.append("2011_09_26/none.png None 721.5377")
            (root / f"kitti_eigen_{name}.txt").write_text("\n".join(lines) + "\n")
    return root


def own(root: Path, kind: str) -> Path:
    for split, count in (("train", 6), ("val", 3)):
        for i in range(count):
            rgb, depth = {
                "two folders": (f"rgb/{split}/{i}.jpg", f"depth/{split}/{i}.png"),
                "split first": (f"{split}/images/{i}.jpg", f"{split}/depth/{i}.png"),
                "side by side": (f"{split}/{i}.color.jpg", f"{split}/{i}.depth.png"),
                "no splits": (f"{split}{i}.color.jpg", f"{split}{i}.depth.png"),
                "no splits, two folders": (f"rgb/{split}{i}.jpg", f"depth/{split}{i}.png"),
            }[kind]
            photo(root / rgb, seed=i)
            numbers(root / depth, round(1000 * metres(f"{split}{i}")))
    return root
