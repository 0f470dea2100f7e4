"""Where the standard data sets of depth keep photos and maps."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from selectivit.data.find import SUFFIXES
from selectivit.data.pairing import Found, LayoutError, files_below

DEPTH_SUFFIXES = (".png", ".tif", ".tiff")
Pair = tuple[str, Path, Path]


class DepthLayoutError(LayoutError):
    """A folder that is not laid out as it should be; the text says what was expected, what came, and what to do."""


@dataclass(frozen=True)
class DepthLayout:
    """How one data set lies in folders.

    Args:
        name: of the layout.
        units: numbers in a file that make a metre.
        max_depth: metres; what is farther is left out, as the benchmarks do.
        holds: what is expected, in words.
        fits: whether a folder looks like it.
        find: from the root and a split to its files.
        rotated: whether the low three bits of each number stand at its top.
        benchmark_crop: whether photos are cut to KITTI's benchmark.
    """

    name: str
    units: float
    max_depth: float
    holds: str
    fits: Callable[[Path], bool]
    find: Callable[[Path, str], Found]
    rotated: bool = False
    benchmark_crop: bool = False


def _found(pairs: Iterable[Pair], split: str, notes: tuple[str, ...] = ()) -> Found:
    return Found(tuple(sorted(pairs)), {}, split, notes)


def _list_of(root: Path, split: str, *patterns: str) -> Path | None:
    """The text file that lists a split: of the patterns, with {} for the split, the first that is there."""
    names = {"val": ("val", "test"), "test": ("test", "val")}.get(split, (split,))
    for name in names:
        for pattern in patterns:
            found = sorted(root.glob(pattern.format(name)))
            if found:
                return found[0]
    return None


def _listed(root: Path, file: Path, photos: tuple[str, ...], maps: tuple[str, ...]) -> tuple[list[Pair], int]:
    """The pairs of a list (photo, map, and what else stands on a line), and how many have no map."""
    pairs, missing, without = [], [], 0
    lines = [line.split() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    for number, parts in enumerate(lines, 1):
        if len(parts) < 2:
            raise DepthLayoutError(f"{file}, line {number}: expected a photo and a depth map, got {' '.join(parts)!r}")
        if parts[1] == "None":  # KITTI's lists name photos without a map so
            without += 1
            continue
        names = [part.lstrip("/") for part in parts[:2]]
        places = [
            next((p for p in (root / folder / name for folder in folders) if p.is_file()), None)
            for name, folders in zip(names, (photos, maps), strict=True)
        ]
        if places[0] is None or places[1] is None:
            missing.append(names[0] if places[0] is None else names[1])
        else:
            pairs.append((names[0].rpartition(".")[0], places[0], places[1]))
    if missing:
        raise DepthLayoutError(
            f"{len(missing)} files that {file} lists are missing, such as {missing[0]} below {root}: get a whole copy, "
            "or shorten the list"
        )
    if not pairs:
        raise DepthLayoutError(f"{file} lists nothing: expected a photo and a depth map a line")
    return pairs, without


def _split_folder(root: Path, split: str, also: Mapping[str, str]) -> str:
    """The name that the root has for a split."""
    for name in (split, also.get(split, split)):
        if (root / name).is_dir():
            return name
    there = sorted(p.name for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))
    raise DepthLayoutError(f"{root} has no split {split!r}; the folders there are: {', '.join(there) or 'none'}")


def _both(photos: Mapping[str, Path], maps: Mapping[str, Path], where: str) -> list[Pair]:
    alone = sorted(photos.keys() ^ maps.keys())
    if alone:
        kind = "photo without a depth map" if alone[0] in photos else "depth map without a photo"
        raise DepthLayoutError(
            f"{where}: {len(alone)} photos and depth maps have no counterpart, such as {alone[0]!r}, a {kind}: get a "
            "whole copy, or take them out"
        )
    return [(name, photos[name], maps[name]) for name in photos]


# ---- NYUv2: nyu_train.txt, nyu_test.txt, or train/SCENE/rgb_*.jpg beside sync_depth_*.png


def _is_nyu(root: Path) -> bool:
    return any(root.glob("nyu_*.txt")) or any(root.glob("*/*/sync_depth_*.png"))


def _nyu(root: Path, split: str) -> Found:
    file = _list_of(root, split, "nyu_{}*.txt", "{}.txt")
    if file is not None:
        name = file.stem.removeprefix("nyu_")
        pairs, _ = _listed(root, file, ("", name), ("", name))
        return _found(pairs, name)
    folder = root / _split_folder(root, split, {"val": "test"})
    photos = {_nyu_name(p, folder, "rgb_"): p for p in folder.glob("*/rgb_*.*")}
    maps = {_nyu_name(p, folder, "sync_depth_"): p for p in folder.glob("*/sync_depth_*.png")}
    return _found(_both(photos, maps, str(folder)), folder.name)


def _nyu_name(path: Path, folder: Path, prefix: str) -> str:
    return f"{path.parent.relative_to(folder).as_posix()}/{path.stem.removeprefix(prefix)}"


# ---- SUN RGB-D: SENSOR/…/SCENE/image/*.jpg and depth_bfx/*.png, a split by a list


def _is_sun(root: Path) -> bool:
    below = (root, root / "SUNRGBD")
    return any(any(r.glob(p)) for r in below for p in ("kv[12]", "realsense", "xtion", "SUNRGBD_*split*.txt"))


def _sun(root: Path, split: str) -> Found:
    if not any((root / name).exists() for name in ("kv1", "kv2", "realsense", "xtion")) and (root / "SUNRGBD").is_dir():
        inside, outside = root / "SUNRGBD", root
    else:
        inside, outside = root, root
    for where in (inside, outside):
        file = None if split == "all" else _list_of(where, split, "SUNRGBD_{}*.txt", "sunrgbd_{}*.txt", "{}.txt")
        if file is not None:
            pairs, _ = _listed(where, file, ("", "SUNRGBD"), ("", "SUNRGBD"))
            return _found(pairs, split)
    if split != "all":
        raise DepthLayoutError(
            f"{root} has no list of the split {split!r} (SUNRGBD_{split}_splits.txt, a photo and a depth map a line): "
            "write one, or take the split all"
        )
    pairs = []
    for folder in sorted(p.parent for p in inside.rglob("image") if p.is_dir()):
        maps = [p for kind in ("depth_bfx", "depth") for p in sorted((folder / kind).glob("*.png"))]
        photos = sorted(files_below(folder / "image", SUFFIXES))
        if len(photos) != 1 or not maps:
            raise DepthLayoutError(f"{folder}: expected one photo in image/ and a map in depth_bfx/ or depth/")
        pairs.append((folder.relative_to(inside).as_posix(), photos[0], maps[0]))
    return _found(pairs, "all")


# ---- KITTI: lists of the Eigen split, or train|val/DRIVE/proj_depth/groundtruth/image_0[23]/*.png


def _is_kitti(root: Path) -> bool:
    drives = any(root.glob("*/*_drive_*_sync")) or any(root.glob("*/*/*_drive_*_sync"))
    return drives or any(root.glob("kitti_*.txt")) or any(root.glob("eigen_*.txt"))


_KITTI_PHOTOS = ("", "input", "raw", "raw_data", "kitti_raw")
_KITTI_MAPS = ("", "gt_depth", "train", "val", "data_depth_annotated/train", "data_depth_annotated/val")


def _kitti(root: Path, split: str) -> Found:
    file = _list_of(root, split, "kitti_eigen_{}*.txt", "eigen_{}*.txt", "{}.txt")
    if file is not None:
        pairs, without = _listed(root, file, _KITTI_PHOTOS, _KITTI_MAPS)
        notes = (f"{without} photos of {file.name} without a depth map are left out",) if without else ()
        return _found(pairs, file.stem, notes)
    base = root / "data_depth_annotated" if (root / "data_depth_annotated").is_dir() else root
    folder = base / _split_folder(base, split, {"test": "val"})
    pairs, missing = [], []
    for depth in sorted(folder.glob("*/proj_depth/groundtruth/image_0[23]/*.png")):
        drive, camera = depth.relative_to(folder).parts[0], depth.parent.name
        date = re.match(r"\d{4}_\d{2}_\d{2}", drive)
        below = f"{date[0] if date else ''}/{drive}/{camera}/data".lstrip("/")
        stems = [root / f / below / depth.stem for f in _KITTI_PHOTOS]
        photo = next((p for s in stems for p in (s.with_suffix(".png"), s.with_suffix(".jpg")) if p.is_file()), None)
        if photo is None:
            missing.append(f"{below}/{depth.stem}.png")
        else:
            pairs.append((f"{drive}/{camera}/{depth.stem}", photo, depth))
    if missing:
        raise DepthLayoutError(
            f"{len(missing)} depth maps of {folder} have no photo, such as {missing[0]} below {root}: get the raw data"
        )
    return _found(pairs, folder.name)


# ---- one's own folder: side by side, or in two folders

_PHOTO_FOLDERS, _MAP_FOLDERS = ("rgb", "images", "image", "color"), ("depth", "depths", "depth_maps")
_ENDS = ((".color", ".depth"), ("_color", "_depth"), ("_rgb", "_depth"), (".rgb", ".depth"))


def _folder(root: Path, split: str) -> Found:
    two = _two_folders(root, split)
    if two is not None:
        photos_in, maps_in, name = two
        photos = {_stem(p, photos_in): p for p in files_below(photos_in, SUFFIXES)}
        maps = {_stem(p, maps_in): p for p in files_below(maps_in, DEPTH_SUFFIXES)}
        return _found(_both(photos, maps, f"{photos_in} and {maps_in}"), name)
    folder, name = root, "all"
    if split != "all":
        folder = root / _split_folder(root, split, {"val": "test", "test": "val"})
        name = folder.name
    photos, maps = {}, {}
    for path in files_below(folder, SUFFIXES):
        stem = _stem(path, folder)
        for photo_end, map_end in _ENDS:
            if stem.endswith(photo_end):
                photos[stem.removesuffix(photo_end)] = path
                break
            if stem.endswith(map_end) and path.suffix.lower() in DEPTH_SUFFIXES:
                maps[stem.removesuffix(map_end)] = path
                break
    return _found(_both(photos, maps, str(folder)), name)


def _two_folders(root: Path, split: str) -> tuple[Path, Path, str] | None:
    """Folders of photos and of maps: rgb/SPLIT and depth/SPLIT, SPLIT/rgb and SPLIT/depth, or rgb and depth."""
    bases = [root] if split == "all" else [root / split, root]
    for base in bases:
        photos = next((base / n for n in _PHOTO_FOLDERS if (base / n).is_dir()), None)
        maps = next((base / n for n in _MAP_FOLDERS if (base / n).is_dir()), None)
        if photos is None or maps is None:
            continue
        if split == "all" or base != root:
            return photos, maps, split
        name = _split_folder(photos, split, {"val": "test", "test": "val"})
        return photos / name, maps / _split_folder(maps, name, {}), name
    return None


def _stem(path: Path, folder: Path) -> str:
    return path.relative_to(folder).with_suffix("").as_posix()


LAYOUTS = {
    "nyu": DepthLayout("nyu", 1000, 10, "nyu_train.txt and nyu_test.txt, or SPLIT/SCENE/rgb_*.jpg", _is_nyu, _nyu),
    "sunrgbd": DepthLayout(
        "sunrgbd", 1000, 10, "kv1, kv2, realsense and xtion, with SUNRGBD_SPLIT_splits.txt", _is_sun, _sun, rotated=True
    ),
    "kitti": DepthLayout(
        "kitti", 256, 80, "kitti_eigen_SPLIT.txt, or SPLIT/DRIVE/proj_depth", _is_kitti, _kitti, benchmark_crop=True
    ),
    "folder": DepthLayout(
        "folder", 1000, 10, "rgb/ and depth/, or NAME.color.jpg beside NAME.depth.png", lambda root: True, _folder
    ),
}
"""Name -> layout, in the order in which they are tried."""
