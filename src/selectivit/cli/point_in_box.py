"""Point-in-Box: does the patch that is most like the class token lie on the object? Block by block, without training.

DATA is a COCO JSON; a folder with annotations/instances_SPLIT*.json, with VOC's Annotations and JPEGImages, or with XML
files beside their pictures; or a data set with masks of classes, where a class's box is drawn around all its pixels.
Writes point_in_box.json, a plot over the blocks, and heat maps of the first photos. A stopped run goes on where it was.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser, Namespace

from selectivit.cli.options import SwapOptions, add_options, option, pick_device, take
from selectivit.cli.ranks import Ranks, torchrun_ranks
from selectivit.cli.variants import PlaceOptions, add_models, each_variant, model_names
from selectivit.data.writing import check_writable

if TYPE_CHECKING:
    from selectivit.data.boxes import BoxData
    from selectivit.eval.point_in_box import Rules

HELP = "Point-in-Box: whether the patch most like the class token lies on the object, per block"


@dataclass(frozen=True)
class PointInBoxOptions:
    """Which objects, and how photos are seen."""

    source: str | None = option(None, "KIND", "boxes from xml, json or masks; default: the first that DATA has")
    split: str = option("val", "NAME", "the split that is scored")
    images: str | None = option(None, "FOLDER", "of the pictures, where it is not the usual one (xml and json)")
    layout: str | None = option(None, "NAME", "layout of a data set with masks; default: found out")
    objects: str = option("one", "WHICH", "one: photos of one object; any: of several too, and any of them will do")
    max_area: float = option(
        0.25, "SHARE", "leave out photos whose boxes cover this share of them or more; 1 keeps all"
    )
    classes: str | None = option(
        None, "NAME,NAME,…", "what counts as an object, or coco_object or voc for those lists; default: all classes"
    )
    resize: int = option(256, "PX", "the photo's shorter side, before")
    size: int = option(224, "PX", "the middle crop is cut out; whole patches")
    against: str = option(
        "cls", "WHAT", "patches are compared with cls, or with the patches' mean (models without cls)"
    )
    norm: bool = option(True, "BOOL", "pass the tokens of every block through the model's final norm")
    num_cores: int | None = option(None, "N", "cores that a core-periphery model (VECA) is to use; default: all")
    batch_size: int = option(8, "N", "photos that are computed at once")
    pictures: int = option(8, "N", "photos whose heat maps are drawn")


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the command's options.

    Args:
        parser: the command's parser.
    """
    parser.add_argument("data", type=str, help="a COCO JSON, or the data set's folder")
    add_models(parser)
    add_options(parser, PlaceOptions)
    add_options(parser, PointInBoxOptions)
    add_options(parser, SwapOptions, normalizer="softmax")


def run(options: Namespace) -> int:
    """Score, write, and print a table.

    Args:
        options: the parsed options.

    Returns:
        The exit status: 0 all done, 1 some photos could not be used.

    Raises:
        ValueError: data, a model or numbers that do not fit; no photo that counts.
        WriteError: the folder cannot be written to.
    """
    with torchrun_ranks() as ranks:
        return _run(options, ranks)


def _run(options: Namespace, ranks: Ranks) -> int:
    import torch

    from selectivit.cli.point_in_box_report import report
    from selectivit.cli.point_in_box_scoring import Job, score

    where, what, swap = take(PlaceOptions, options), take(PointInBoxOptions, options), take(SwapOptions, options)
    for name in ("batch_size", "pictures"):
        if getattr(what, name) < (name == "batch_size"):
            raise ValueError(
                f"expected --{name.replace('_', '-')} of 0 or more (of 1 a batch), got {getattr(what, name)}"
            )
    out, device = Path(where.out), pick_device(where.device, ranks.local_rank)
    check_writable(out)
    torch.manual_seed(where.seed)
    data, rules = _open(Path(options.data), what)
    found, notes = [], list(data.notes)
    for variant, model, note in each_variant(model_names(options.model), swap, where.seed, device):
        notes += [] if note is None else [note]
        found.append(score(variant, model, Job(data, rules, what), ranks, out=out, seed=where.seed))
    if ranks.rank:
        return 0
    settings = {**asdict(what), **asdict(swap)}
    return report(options.data, out, where, settings, data, rules, found, notes)


def _open(path: Path, what: PointInBoxOptions) -> tuple[BoxData, Rules]:
    from selectivit.data.boxes import open_boxes
    from selectivit.eval.point_in_box import AGAINST, Rules

    if what.against not in AGAINST:
        raise ValueError(f"expected --against {' or '.join(AGAINST)}, got {what.against!r}")
    data = open_boxes(path, what.source, split=what.split, images=what.images, layout=what.layout)
    return data, Rules(what.objects, what.max_area, _labels(what.classes), what.resize, what.size)


def _labels(text: str | None) -> frozenset[str] | None:
    """What counts as an object: names, or those of a list that comes with the package."""
    if text is None:
        return None
    from selectivit.data.class_lists import standard_classes

    if text in ("coco_object", "voc"):
        return frozenset(standard_classes(text).names) - {"background"}
    return frozenset(name.strip() for name in text.split(",") if name.strip())
