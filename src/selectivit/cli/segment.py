"""Segment photos by words with a frozen CLIP: a picture with a legend, an index picture and a JSON file a photo.

A photo whose results are there already, made from the same photo with the same settings, is kept; so a stopped run goes
on where it was. Photos that cannot be read are named and skipped. Under torchrun the photos are split among the
processes, with the same result.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, Namespace

from selectivit.cli.jobs import Outcome, find_photos, finish, work_through
from selectivit.cli.options import RunOptions, add_options, option, pick_device, take
from selectivit.cli.progress import progress
from selectivit.cli.ranks import Ranks, torchrun_ranks
from selectivit.cli.segment_files import FILES, holds_another
from selectivit.cli.segmentation import SegmentationJob
from selectivit.data.digest import tensors_digest
from selectivit.data.writing import check_writable

if TYPE_CHECKING:
    from selectivit.openvocab.segmenter import OpenVocabularySegmenter

HELP = "segment photos by words with a frozen CLIP: overlay, index picture and JSON"
INDEX = "segment.json"


@dataclass(frozen=True)
class SegmentOptions:
    """What to look for, and how."""

    labels: str | None = option(None, "WORDS", "classes with commas between, synonyms with bars: road,car|truck,sky")
    labels_file: str | None = option(
        None,
        "FILE",
        "a text file with a class a line, synonyms with bars between; lines that begin with # are passed over",
    )
    preset: str = option(
        "entmax-qq",
        "NAME",
        "how CLIP is read: clip, maskclip, sclip, clearclip, naclip, gem, selectivit, or entmax- with qk, qq, kk, vv, "
        "qq+kk or qq+kk+vv",
    )
    alpha: str | None = option(
        None,
        "ALPHA",
        "entmax's alpha in place of the preset's normalizer: 1 (softmax) or more, or auto: chosen for each photo and "
        "head by how diffuse its softmax is",
    )
    templates: str | None = option(
        None, "NAME", "prompts around the words: imagenet80, imagenet7, photo or none; default: the preset's"
    )
    background: str | None = option(
        None,
        "WORDS",
        "what becomes class 0: words with commas between; or 'below', what falls below the preset's threshold",
    )
    threshold: float | None = option(None, "P", "probability (0..1) below which a pixel is background")
    size: int | None = option(None, "PX", "the photo's shorter side in pixels; default: the preset's")
    refine: bool = option(False, "BOOL", "draw edges to those of the photo")


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the command's options.

    Args:
        parser: the command's parser.
    """
    parser.add_argument("paths", nargs="+", type=str, help="photos, and folders that are searched for photos")
    add_options(parser, RunOptions, model="ViT-B-16/openai")
    add_options(parser, SegmentOptions)


def run(options: Namespace) -> int:
    """Segment and write.

    Args:
        options: the parsed options.

    Returns:
        The exit status: 0 all done, 1 something was skipped, 2 nothing could be done.

    Raises:
        ValueError: no photos, no labels, an unknown model, preset or template.
        WriteError: the folder cannot be written to.
    """
    with torchrun_ranks() as ranks:
        return _run(options, ranks)


def _run(options: Namespace, ranks: Ranks) -> int:
    where, what = take(RunOptions, options), take(SegmentOptions, options)
    labels = read_labels(what.labels, what.labels_file)
    out, outcome = Path(where.out), Outcome()
    check_writable(out)
    photos = find_photos(options.paths, outcome, partial(holds_another, out=out), first=ranks.rank == 0)

    import torch

    torch.manual_seed(where.seed)
    segmenter = _segmenter(where, what, labels, str(pick_device(where.device, ranks.local_rank)))
    settings = _settings(where, what, segmenter)
    share = ranks.share(photos)
    with progress("photos", len(share), shown=ranks.rank == 0) as tell:
        job = SegmentationJob(segmenter, out, settings, outcome, tell)
        work_through(lambda: job.run(share), out / INDEX, settings, outcome, photos, FILES, ranks)
    return finish(out / INDEX, settings, outcome, photos, FILES, ranks)


def read_labels(labels: str | None, labels_file: str | None) -> list[str]:
    """Read the classes from --labels or --labels-file.

    Args:
        labels: classes with commas between.
        labels_file: a UTF-8 text file, a class a line; empty lines and those that begin with # are passed over.

    Returns:
        The classes.

    Raises:
        ValueError: neither or both, no UTF-8, or none.
        OSError: the file cannot be read.

    Example:
        >>> read_labels("road, car|truck", None)
        ['road', 'car|truck']
    """
    if (labels is None) == (labels_file is None):
        raise ValueError("expected classes by --labels road,car,sky or by --labels-file FILE, one of the two")
    if labels is not None:
        return [label.strip() for label in labels.split(",")]
    try:
        lines = Path(str(labels_file)).read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise ValueError(f"{labels_file} is no UTF-8 text: expected a class a line") from None
    found = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not found:
        raise ValueError(f"{labels_file} holds no classes: expected one a line")
    return found


def _segmenter(where: RunOptions, what: SegmentOptions, labels: list[str], device: str) -> OpenVocabularySegmenter:
    from selectivit.openvocab.presets import find_preset
    from selectivit.openvocab.segmenter import OpenVocabularySegmenter

    preset = replace(find_preset(what.preset), seed=where.seed)
    if what.size is not None:
        preset = replace(preset, size=what.size)
    if what.alpha is not None:
        preset = replace(preset, normalizer="entmax", alpha=parse_alpha(what.alpha))
    background: Any = what.background is not None and what.background.strip() == "below"
    if what.background is not None and not background:
        background = [word.strip() for word in what.background.replace("|", ",").split(",")]
    return OpenVocabularySegmenter(
        where.model,
        labels,
        preset,
        templates=what.templates,
        background=background,
        threshold=what.threshold,
        refine=what.refine,
        device=device,
    )


def parse_alpha(text: str) -> Any:
    """Read the option --alpha.

    Args:
        text: a number, or auto.

    Returns:
        The number, or "auto".

    Raises:
        ValueError: something else.

    Example:
        >>> parse_alpha("1.2"), parse_alpha("auto")
        (1.2, 'auto')
    """
    if text.strip() == "auto":
        return "auto"
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"expected --alpha auto or a number of 1 or more, got {text!r}") from None


def _settings(where: RunOptions, what: SegmentOptions, segmenter: OpenVocabularySegmenter) -> dict[str, Any]:
    """Gather all that the result depends on beside the photo: where any of it differs, it is computed anew."""
    from selectivit import __version__

    return {
        "selectivit": __version__,
        "model": where.model,
        "weights_sha256": tensors_digest(segmenter.model.state_dict()),
        "classes": [list(label.words) for label in segmenter.labels],
        "preset": what.preset,
        "preset_settings": asdict(segmenter.preset),
        "templates": list(segmenter.templates),
        "has_background": segmenter.has_background,
        "threshold": segmenter.threshold,
        "refine": what.refine,
    }
