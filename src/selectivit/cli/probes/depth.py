"""Depth by a linear layer on frozen patches (DINOv2's linear-1, 256 bins), scored at the depth maps' own resolution.

DATA is NYUv2, SUN RGB-D or KITTI as the depth benchmarks lay them out, or a folder of photos and 16-bit depth maps:
rgb/ and depth/, with or without a folder a split, or NAME.color.jpg beside NAME.depth.png.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, Namespace

from selectivit.cli.options import add_options, option, take
from selectivit.cli.probes.making import Probe, run_probe
from selectivit.cli.probes.setting import Setting, add_common
from selectivit.cli.probes.training import (
    DenseSplitOptions,
    TrainingOptions,
    check_protocol,
    cut_in_two,
    fit_settings,
    training_line,
    training_record,
)

if TYPE_CHECKING:
    from selectivit.data.depth import DepthData
    from selectivit.eval.feature_cache import FeatureCache

HELP = "depth by a linear head (NYUv2, SUN RGB-D, KITTI, or your own folder of RGB and 16-bit depth)"
EVAL_CROPS = {"nyu": "eigen", "kitti": "garg"}


@dataclass(frozen=True)
class DepthOptions:
    """What is measured, and where it is scored."""

    units: float | None = option(
        None, "N", "numbers in a depth file that make a metre; default: the layout's, 1000 (mm) for your own folder"
    )
    eval_crop: str | None = option(
        None, "NAME", "pixels that are scored: none, eigen (NYUv2), garg or kitti-eigen; default: eigen, garg, or none"
    )
    eval_on: str | None = option(None, "FOLDER", "score on this data set in place of the split --val-split of DATA")
    crop: str | None = option(None, "H,W", "size of the crops (dinov2), px; default: 416,544 in whole patches")


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the kind's options.

    Args:
        parser: the kind's parser.
    """
    parser.add_argument("data", type=str, help="the data set's folder")
    add_options(parser, TrainingOptions)
    add_options(parser, DepthOptions)
    add_options(parser, DenseSplitOptions)
    add_common(parser, tokens="cls+patch")


def open_splits(root: Path, which: DenseSplitOptions, what: DepthOptions) -> tuple[DepthData, DepthData]:
    """Open the data to learn from and the data to score.

    Args:
        root: the data set's folder.
        which: layout and splits.
        what: units, and another data set to score.

    Returns:
        Both.

    Raises:
        ValueError: splits that are not there.
    """
    from selectivit.data.depth import open_depth

    if which.holdout is not None:
        return cut_in_two(open_depth(root, which.layout, "all", units=what.units), which.holdout)
    try:
        train = open_depth(root, which.layout, which.train_split, units=what.units)
    except ValueError as error:
        if "has no split" in str(error):
            raise ValueError(f"{error}; a folder without splits is cut in two by --holdout 0.2") from error
        raise
    if what.eval_on is not None:
        return train, open_depth(what.eval_on, None, which.val_split)
    return train, open_depth(root, which.layout, which.val_split, units=what.units)


def prepare(setting: Setting, options: Namespace) -> Probe:
    """Open the data.

    Args:
        setting: the model.
        options: of the kind.

    Returns:
        The probe.

    Raises:
        ValueError: data that cannot be used, or numbers that do not fit.
    """
    from selectivit.eval.depth_metrics import CROPS

    how, what = take(TrainingOptions, options), take(DepthOptions, options)
    check_protocol(how)
    train, val = open_splits(Path(options.data), take(DenseSplitOptions, options), what)
    scored = what.eval_crop or EVAL_CROPS.get(val.name, "none")
    if scored not in CROPS:
        raise ValueError(f"expected --eval-crop {', '.join(CROPS)}, got {scored!r}")
    if how.protocol == "fast":
        return _fast(setting, how, scored, train, val)
    return _dinov2(setting, how, scored, what.crop, train, val)


def _fast(setting: Setting, how: TrainingOptions, scored: str, train: DepthData, val: DepthData) -> Probe:
    from selectivit.data.views import View
    from selectivit.eval.depth import FAST, PROTOCOL, cached_depth, score_depth, train_depth_head
    from selectivit.eval.feature_cache import PhotoSet
    from selectivit.eval.token_table import TokenTable
    from selectivit.features import preprocessing

    training = fit_settings(how, FAST)
    view = View("whole", setting.what.size or min(preprocessing(setting.cache.model).image_size))
    sets = [
        PhotoSet(DepthPhotos(part), digest, part.split)
        for part, digest in zip((train, val), _digests(train, val), strict=True)
    ]

    def make(layers: Sequence[int], settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
        both = [TokenTable(setting.cache.blocks(s, view, layers, "dense"), setting.what.tokens) for s in sets]
        keeping = setting.keeping(settings, how.checkpoint_every)
        with setting.progress("training steps", training.steps) as tell_step:
            head, bad = train_depth_head(
                train, both[0], training, setting.where.seed, setting.device, keeping, tell_step
            )
        with setting.progress("scored", len(val)) as tell_photo:
            found, missed = score_depth(val, cached_depth(head, both[1], setting.device), scored, tell_photo)
        return found, bad | missed | {n: w for table in both for n, w in table.blocks[0].problems.items()}

    def warm(cache: FeatureCache, layers: Sequence[int]) -> None:
        for photos in sets:
            cache.blocks(photos, view, layers, "dense")

    lines = [*_data_lines(train, val, scored), f"seen: whole photos, shorter side {view.size} px, in whole patches"]
    lines.append(training_line(training, "photos"))
    decides = {"data": _record(train, val, scored), "view": view.record(), "protocol": "fast"}
    decides |= {"training": training_record(training)}
    return Probe("depth", PROTOCOL, lines, decides, warm, make, _HEADLINE, (*train.notes, *val.notes))


def _dinov2(
    setting: Setting, how: TrainingOptions, scored: str, crop: str | None, train: DepthData, val: DepthData
) -> Probe:
    from selectivit.data.views import check_whole_patches
    from selectivit.eval.depth import score_depth
    from selectivit.eval.depth_crops import CROP, DINOV2, PROTOCOL, train_depth_on_crops, whole_photo_depth
    from selectivit.features import preprocessing

    patch = preprocessing(setting.cache.model).patch_size
    if crop is None:
        height, width = (max(1, round(side / patch)) * patch for side in CROP)
    else:
        try:
            height, width = (int(part) for part in crop.split(","))
        except ValueError:
            raise ValueError(f"expected --crop HEIGHT,WIDTH such as 416,544, got {crop!r}") from None
    for side in (height, width):
        check_whole_patches(side, patch)
    training = fit_settings(how, DINOV2)

    def make(layers: Sequence[int], settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
        front, workers = setting.front(layers), setting.what.workers
        keeping = setting.keeping(settings, how.checkpoint_every)
        with setting.progress("training steps", training.steps) as tell_step:
            head, bad = train_depth_on_crops(
                train, front, (height, width), training, setting.where.seed, workers, keeping, tell_step
            )
        with setting.progress("scored", len(val)) as tell_photo:
            found, missed = score_depth(val, whole_photo_depth(head, front, val), scored, tell_photo)
        return found, bad | missed

    lines = [*_data_lines(train, val, scored), f"seen: crops of {height} x {width} px; whole photos when scored"]
    lines.append(training_line(training, "crops"))
    decides = {"data": _record(train, val, scored), "view": {"crop": [height, width]}, "protocol": "dinov2"}
    decides |= {"training": training_record(training)}
    return Probe("depth", PROTOCOL, lines, decides, lambda *_: None, make, _HEADLINE, (*train.notes, *val.notes))


class DepthPhotos:
    """The photos of a split of depth, as the cache reads photos.

    Args:
        data: the split.
    """

    def __init__(self, data: DepthData):
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def name(self, index: int) -> str:
        """What to call one."""
        return self.data.name_of(index)

    def read(self, index: int, shorter_side: int | None = None) -> Any:
        """One as 8-bit RGB, cut as its depth map is."""
        return self.data.image(index)


_HEADLINE = ("depth RMSE (m)", lambda result: result["rmse"], False)


def _digests(*parts: DepthData) -> list[str]:
    from selectivit.data.digest import stat_digest

    return [
        f"{stat_digest([pair[1] for pair in part.pairs], part.pairs[0][1].parent)} {part.benchmark_crop}"
        for part in parts
    ]


def _data_lines(train: DepthData, val: DepthData, scored: str) -> list[str]:
    return [
        f"data: learnt from {len(train)} photos ({train.name}, {train.split}), scored on {len(val)} "
        f"({val.name}, {val.split})",
        f"depth: {val.min_depth:g} to {val.max_depth:g} m, {val.units:g} units a metre, scored crop: {scored}"
        + (", KITTI's benchmark crop 352 x 1216" if val.benchmark_crop else ""),
    ]


def _record(train: DepthData, val: DepthData, scored: str) -> dict[str, Any]:
    from selectivit.data.digest import stat_digest

    parts: dict[str, Any] = {"scored_crop": scored}
    for name, part, digest in zip(("train", "val"), (train, val), _digests(train, val), strict=True):
        maps = stat_digest([pair[2] for pair in part.pairs], part.pairs[0][2].parent)
        parts[name] = {"name": part.name, "split": part.split, "photos": len(part), "sha256": digest}
        parts[name] |= {"maps_sha256": maps, "units": part.units, "depth": [part.min_depth, part.max_depth]}
    return parts


def tell(result: dict[str, Any]) -> None:
    """Print a result."""
    print(f"RMSE {result['rmse']:.4f} m   AbsRel {result['abs_rel']:.4f}   ", end="")
    print("   ".join(f"δ{n} {100 * result[f'delta{n}']:.2f} %" for n in (1, 2, 3)) + f"   {result['photos']} photos")


def run(options: Namespace) -> int:
    """Probe.

    Args:
        options: the parsed options.

    Returns:
        The exit status: 0 all done, 1 some photos were skipped.
    """
    return run_probe(options, prepare, tell)
