"""Segmentation by batch norm and a 1x1 convolution on frozen patches, scored at the masks' own resolution.

DATA is VOC 2012, ADE20K, Cityscapes, Pascal Context, COCO-Stuff or COCO-Object in its usual folders, or a folder with
images/train, images/val, masks/train, masks/val and, to name the classes, classes.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, Namespace

from selectivit.cli.options import add_options, option, take
from selectivit.cli.probes.making import Probe, run_probe
from selectivit.cli.probes.setting import Setting, add_common, photo_set
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
    from selectivit.data.segmentation import SegmentationData
    from selectivit.eval.feature_cache import FeatureCache

HELP = "segmentation by a linear head (VOC, ADE20K, Cityscapes, …, or your own folder)"


@dataclass(frozen=True)
class SegmentationOptions:
    """What is cut out of the photos."""

    crop: int | None = option(None, "PX", "side of crops and windows (dinov2); default: 512 in whole patches")


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the kind's options.

    Args:
        parser: the kind's parser.
    """
    parser.add_argument("data", type=str, help="the data set's folder")
    add_options(parser, TrainingOptions)
    add_options(parser, SegmentationOptions)
    add_options(parser, DenseSplitOptions)
    add_common(parser)


def open_splits(root: Path, which: DenseSplitOptions) -> tuple[SegmentationData, SegmentationData]:
    """Open the split to learn from and the one to score.

    Args:
        root: the data set's folder.
        which: layout and splits.

    Returns:
        Both.

    Raises:
        ValueError: splits that are not there, or whose classes differ.
    """
    from selectivit.data.segmentation import open_segmentation

    if which.holdout is not None:
        return cut_in_two(open_segmentation(root, which.layout, which.val_split), which.holdout)
    try:
        train = open_segmentation(root, which.layout, which.train_split)
    except ValueError as error:
        if "one folder each" in str(error):
            raise ValueError(f"{error}; to cut it in two give --holdout 0.2") from error
        raise
    val = open_segmentation(root, which.layout, which.val_split)
    if train.classes != val.classes:
        raise ValueError(
            f"the splits of {root} have other classes, {len(train.classes)} and {len(val.classes)}: write a "
            "classes.json that names all of them"
        )
    return train, val


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
    how, which = take(TrainingOptions, options), take(DenseSplitOptions, options)
    check_protocol(how)
    train, val = open_splits(Path(options.data), which)
    if how.protocol == "fast":
        return _fast(setting, how, Path(options.data), train, val)
    return _dinov2(setting, how, take(SegmentationOptions, options).crop, train, val)


def _fast(setting: Setting, how: TrainingOptions, root: Path, train: SegmentationData, val: SegmentationData) -> Probe:
    from selectivit.data.views import View
    from selectivit.eval.segmentation import FAST, PROTOCOL, Labelled, report, score_head, train_head
    from selectivit.eval.token_table import TokenTable
    from selectivit.features import preprocessing

    training = fit_settings(how, FAST)
    view = View("whole", setting.what.size or min(preprocessing(setting.cache.model).image_size))
    sets = [photo_set([pair[1] for pair in part.pairs], root, part.split) for part in (train, val)]

    def make(layers: Sequence[int], settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
        both = [
            Labelled(part, TokenTable(setting.cache.blocks(photos, view, layers, "dense"), setting.what.tokens))
            for part, photos in zip((train, val), sets, strict=True)
        ]
        keeping = setting.keeping(settings, how.checkpoint_every)
        with setting.progress("training steps", training.steps) as tell_step:
            head = train_head(both[0], training, setting.where.seed, setting.device, keeping, tell_step)
        with setting.progress("scored", len(val)) as tell_photo:
            found = score_head(head, both[1], setting.device, tell_photo)
        problems = {name: why for part in both for name, why in part.problems.items()}
        return report(found), problems | {n: w for part in both for n, w in part.tokens.blocks[0].problems.items()}

    def warm(cache: FeatureCache, layers: Sequence[int]) -> None:
        for photos in sets:
            cache.blocks(photos, view, layers, "dense")

    lines = [_data_line(train, val), f"seen: whole photos, shorter side {view.size} px, in whole patches"]
    decides = {"data": _record(train, val, [s.digest for s in sets]), "view": view.record(), "protocol": "fast"}
    decides |= {"training": training_record(training)}
    lines.append(training_line(training, "patches"))
    return Probe("segmentation", PROTOCOL, lines, decides, warm, make, _HEADLINE, (*train.notes, *val.notes))


def _dinov2(
    setting: Setting, how: TrainingOptions, crop: int | None, train: SegmentationData, val: SegmentationData
) -> Probe:
    from selectivit.data.views import check_whole_patches
    from selectivit.eval.segmentation import report
    from selectivit.eval.segmentation_crops import (
        DINOV2,
        PROTOCOL,
        crop_of_whole_patches,
        score_sliding,
        train_on_crops,
    )
    from selectivit.features import preprocessing

    patch = preprocessing(setting.cache.model).patch_size
    side = crop_of_whole_patches(patch) if crop is None else crop
    check_whole_patches(side, patch)
    training = fit_settings(how, DINOV2)

    def make(layers: Sequence[int], settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
        front, seed = setting.front(layers), setting.where.seed
        keeping = setting.keeping(settings, how.checkpoint_every)
        with setting.progress("training steps", training.steps) as tell_step:
            head, bad = train_on_crops(train, front, side, training, seed, setting.what.workers, keeping, tell_step)
        with setting.progress("scored", len(val)) as tell_photo:
            found, missed = score_sliding(head, val, front, side, setting.what.batch_size, tell_photo)
        return report(found), bad | missed

    stride = max(1, side * 341 // 512)
    lines = [_data_line(train, val), f"seen: crops and windows of {side} x {side} px, windows {stride} px apart"]
    lines.append(training_line(training, "crops"))
    decides = {"data": _record(train, val, _digests(train, val)), "view": {"crop": side, "stride": stride}}
    decides |= {"protocol": "dinov2", "training": training_record(training)}
    return Probe("segmentation", PROTOCOL, lines, decides, lambda *_: None, make, _HEADLINE, (*train.notes, *val.notes))


_HEADLINE = ("mIoU", lambda result: result["miou"], True)


def _digests(*parts: SegmentationData) -> list[str]:
    from selectivit.data.digest import stat_digest

    return [stat_digest([pair[1] for pair in part.pairs], part.pairs[0][1].parent) for part in parts]


def _data_line(train: SegmentationData, val: SegmentationData) -> str:
    sizes = f"{len(train.classes)} classes, learnt from {len(train)} photos ({train.split})"
    return f"data: {train.name} as {train.layout}, {sizes}, scored on {len(val)} ({val.split})"


def _record(train: SegmentationData, val: SegmentationData, digests: Sequence[str]) -> dict[str, Any]:
    from selectivit.data.digest import stat_digest

    parts: dict[str, Any] = {}
    for name, part, digest in zip(("train", "val"), (train, val), digests, strict=True):
        masks = stat_digest([pair[2] for pair in part.pairs], part.pairs[0][2].parent)
        parts[name] = {"split": part.split, "photos": len(part), "sha256": digest, "masks_sha256": masks}
    return {"name": train.name, "layout": train.layout, "classes": list(train.classes), **parts}


def tell(result: dict[str, Any]) -> None:
    """Print a result."""
    width = max(len(name) for name in result["iou"])
    for name, iou in result["iou"].items():
        print(f"  {name:{width}}  {'not there' if iou is None else f'{100 * iou:6.2f} %'}")
    print(f"mIoU {100 * result['miou']:.2f} %, pixel accuracy {100 * result['pixel_accuracy']:.2f} %, ", end="")
    print(f"{result['photos']} photos")


def run(options: Namespace) -> int:
    """Probe.

    Args:
        options: the parsed options.

    Returns:
        The exit status: 0 all done, 1 some photos were skipped.
    """
    return run_probe(options, prepare, tell)
