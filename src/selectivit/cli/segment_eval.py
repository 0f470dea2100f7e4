"""Score segmentation by words on a data set with masks: mean IoU, a table of classes, the confusion matrix.

VOC 2012, PASCAL Context, ADE20K, COCO-Object, COCO-Stuff and Cityscapes are read as they lie, and so is any folder with
images/, masks/ and classes.json. Scores are counted at the masks' own resolution. What is counted is kept in the folder
for the results; so a stopped run goes on where it was. Pictures and masks that cannot be used are named and skipped.
Under torchrun the pictures are split among the processes, with the same result.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, Namespace

from selectivit.cli.options import RunOptions, add_options, option, pick_device, take
from selectivit.cli.progress import progress, working
from selectivit.cli.ranks import Ranks, torchrun_ranks
from selectivit.cli.segment_eval_job import ScoringJob
from selectivit.cli.segment_eval_parts import Part, part_file, resume, save_part, together
from selectivit.cli.segment_eval_report import REPORT, print_table, write_report
from selectivit.data.digest import names_digest, tensors_digest
from selectivit.data.writing import check_writable

if TYPE_CHECKING:
    from selectivit.data.segmentation import SegmentationData
    from selectivit.openvocab.segmenter import OpenVocabularySegmenter

HELP = "score segmentation by words on a data set with masks: mean IoU, table, confusion matrix"
PARTS = "segment-eval.parts"


@dataclass(frozen=True)
class EvalOptions:
    """What is scored, and how."""

    layout: str | None = option(
        None,
        "NAME",
        "the data set: voc21, voc20, context60, context59, ade20k, coco_object, coco_stuff, cityscapes or folder; "
        "default: found out, with background where it may be left out",
    )
    split: str = option("val", "NAME", "part of the data set, such as val or train")
    preset: str = option(
        "entmax-qq",
        "NAME",
        "how CLIP is read: clip, maskclip, sclip, clearclip, naclip, gem, selectivit, or entmax- with qk, qq, kk, vv, "
        "qq+kk or qq+kk+vv; with what was published for the data set",
    )
    templates: str | None = option(
        None, "NAME", "prompts around the words: imagenet80, imagenet7, photo or none; default: the preset's"
    )
    background: str = option(
        "both",
        "WAY",
        "how pixels become background where the data set has it: words (those of its class list), below (the "
        "threshold), or both",
    )
    threshold: float | None = option(None, "P", "probability (0..1) below which a pixel is background")
    size: int | None = option(None, "PX", "the photo's shorter side in pixels; default: the preset's")
    refine: bool = option(False, "BOOL", "draw edges to those of the photo")
    limit: int | None = option(None, "N", "only the first N pictures")
    workers: int | None = option(None, "N", "processes that read pictures; default: 2 with a CUDA card, else none")


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the command's options.

    Args:
        parser: the command's parser.
    """
    parser.add_argument("data", type=str, help="folder of the data set")
    add_options(parser, RunOptions, model="ViT-B-16/openai")
    add_options(parser, EvalOptions)


def run(options: Namespace) -> int:
    """Evaluate and write.

    Args:
        options: the parsed options.

    Returns:
        The exit status: 0 all done, 1 something was skipped, 2 nothing could be done.

    Raises:
        ValueError: a folder that is no data set, an unknown model, preset or layout, results of other settings.
        WriteError: the folder for the results cannot be written to.
    """
    with torchrun_ranks() as ranks:
        return _run(options, ranks)


def _run(options: Namespace, ranks: Ranks) -> int:
    from selectivit.data.segmentation import open_segmentation

    where, what = take(RunOptions, options), take(EvalOptions, options)
    out = Path(where.out)
    check_writable(out)
    data = open_segmentation(options.data, what.layout, what.split)
    if what.limit is not None and what.limit < 1:
        raise ValueError(f"expected --limit 1 or more, got {what.limit}")
    count = len(data) if what.limit is None else min(what.limit, len(data))
    device = pick_device(where.device, ranks.local_rank)
    with working("loading the model, and the features of all words"):
        segmenter = _segmenter(where, what, data, str(device))
    settings = _settings(where, what, data, segmenter)
    own, before = resume(out / PARTS, settings, len(data.classes), ranks)
    if before.done and max(before.done) >= count:
        raise ValueError(
            f"{out / PARTS} holds {len(before.done)} pictures already, more than --limit {count}: leave --limit out, "
            "or choose another --out"
        )
    there = set(before.done)
    share = ranks.share([number for number in range(count) if number not in there])
    workers = what.workers if what.workers is not None else 2 if device.type == "cuda" else 0
    with progress("pictures", len(share), shown=ranks.rank == 0) as tell:
        save = partial(save_part, part_file(out / PARTS, ranks.rank), settings=settings)
        job = ScoringJob(segmenter, data, own, save, tell, workers)
        job.run(share)
    return _finish(options.data, out, settings, data, job, before, ranks)


def _segmenter(where: RunOptions, what: EvalOptions, data: SegmentationData, device: str) -> OpenVocabularySegmenter:
    from selectivit.openvocab.evaluate import segmenter_for
    from selectivit.openvocab.published import preset_for

    preset = replace(preset_for(what.preset, data.layout), seed=where.seed)
    if what.size is not None:
        preset = replace(preset, size=what.size)
    ground = {"background": what.background, "threshold": what.threshold}
    return segmenter_for(
        where.model, data, preset, templates=what.templates, refine=what.refine, device=device, **ground
    )


def _settings(
    where: RunOptions, what: EvalOptions, data: SegmentationData, segmenter: OpenVocabularySegmenter
) -> dict[str, Any]:
    """Gather all that a picture's result depends on: where any of it differs, nothing is taken over."""
    from selectivit import __version__

    files = [f"{name} {picture.stat().st_size} {mask.stat().st_size}" for name, picture, mask in data.pairs]
    return {
        "selectivit": __version__,
        "model": where.model,
        "weights_sha256": tensors_digest(segmenter.model.state_dict()),
        "data": {"name": data.name, "layout": data.layout, "split": data.split, "pictures": len(data)},
        "files_sha256": names_digest(files),
        "classes": list(data.classes),
        "words": [list(label.words) for label in segmenter.labels],
        "words_source": data.source,
        "preset": what.preset,
        "preset_settings": asdict(segmenter.preset),
        "templates": list(segmenter.templates),
        "has_background": segmenter.has_background,
        "threshold": segmenter.threshold,
        "refine": what.refine,
    }


def _finish(
    path: str,
    out: Path,
    settings: dict[str, Any],
    data: SegmentationData,
    job: ScoringJob,
    kept: Part,
    ranks: Ranks,
) -> int:
    """Put the ranks' counts together, write the report, say what came out."""
    whole = together([kept, *ranks.gather(job.new)])
    skipped = sorted((entry for part in ranks.gather(job.skipped) for entry in part), key=lambda entry: entry["name"])
    if ranks.rank == 0 and whole.confusion.any():
        scores = write_report(out / REPORT, path, settings, data, whole, skipped)
        print_table(scores)
        print(f"{len(whole.done)} done ({len(kept.done)} kept), {len(skipped)} skipped: {out / REPORT}")
    # torchrun ends all processes as soon as one fails: not before the report is written.
    ranks.gather(None)
    if not whole.confusion.any():
        raise ValueError(f"no pixel of {len(data)} pictures could be scored: {len(skipped)} skipped, the rest void")
    return 1 if skipped else 0
