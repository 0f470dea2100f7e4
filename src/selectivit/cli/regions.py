"""Rank captions of regions with a frozen CLIP (FG-OVD): top-1 by difficulty and attribute, mHME, mean and median rank.

Each region has a right caption and others that differ in a few attributes; a wrong one that is as near counts against.
Ranks are noted photo by photo, so a run that was stopped goes on where it was, and one that is asked for again ends at
once. Photos that are not there are named and left out. Under torchrun the photos are split among the processes, with
the same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, Namespace

from selectivit.cli.journal import Journal, key_of
from selectivit.cli.memory import ADVICE, within_memory
from selectivit.cli.options import RunOptions, add_options, option, pick_device, take
from selectivit.cli.progress import progress
from selectivit.cli.ranks import Ranks, torchrun_ranks
from selectivit.cli.region_files import photos_of, ranks_by_subset, read_subsets
from selectivit.cli.region_report import report
from selectivit.data.digest import file_digest, tensors_digest
from selectivit.data.writing import check_writable

if TYPE_CHECKING:
    from selectivit.openvocab.regions import Region

HELP = "rank captions of regions with a frozen CLIP (FG-OVD): top-1, mHME, mean and median rank"
RESULT = "regions.json"


@dataclass(frozen=True)
class RegionOptions:
    """How regions are compared with captions."""

    images: str | None = option(None, "FOLDER", "where the photos lie, under the files' names or without their folders")
    preset: str = option(
        "entmax-qq", "NAME", "how CLIP is read under roialign: a name that `selectivit segment --preset` knows"
    )
    protocol: str = option(
        "roialign",
        "NAME",
        "roialign: the dense map pooled over the box; crop: the box cut out and embedded as an image",
    )
    size: int = option(224, "PX", "side of the square that a photo is squashed to under roialign")
    templates: str = option("none", "NAME", "prompts around the captions: imagenet80, imagenet7, photo or none")


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the command's options.

    Args:
        parser: the command's parser.
    """
    text = "annotation files of FG-OVD (1_attributes.json, color.json, …), or folders that hold them"
    parser.add_argument("annotations", nargs="+", type=str, help=text)
    add_options(parser, RunOptions, model="ViT-B-16/openai")
    add_options(parser, RegionOptions)


def run(options: Namespace) -> int:
    """Rank and write.

    Args:
        options: the parsed options.

    Returns:
        The exit status: 0 all done, 1 photos were left out, 2 nothing could be done.

    Raises:
        ValueError: no annotation file or a damaged one, no folder of photos, an unknown model, preset or protocol.
        WriteError: the folder cannot be written to.
    """
    with torchrun_ranks() as ranks:
        return _run(options, ranks)


def _run(options: Namespace, ranks: Ranks) -> int:
    from selectivit.models.clip import load_clip
    from selectivit.openvocab.presets import find_preset
    from selectivit.openvocab.region_ranking import check_protocol, find_region_photo

    where, what, out = take(RunOptions, options), take(RegionOptions, options), Path(options.out)
    preset = replace(find_preset(what.preset), seed=where.seed)
    subsets = read_subsets(options.annotations)
    photos = photos_of(subsets)
    folder = _photo_folder(what.images, list(photos))
    check_writable(out)
    clip = load_clip(where.model, device=str(pick_device(where.device, ranks.local_rank)))
    check_protocol(clip, what.protocol, what.size)
    settings = _settings(where, what, preset, clip[0])
    more = {"preset": preset, "protocol": what.protocol, "size": what.size, "templates": what.templates}
    found: dict[str, list[int]] = {}
    missing: dict[str, str] = {}
    share = ranks.share(list(photos))
    with Journal(out / "regions.work", ranks) as journal, progress("photos", len(share), shown=ranks.rank == 0) as tell:
        for name in share:
            ranked = _ranked(find_region_photo(folder, name), photos[name], clip, settings, journal, more)
            if isinstance(ranked, str):
                missing[name] = ranked
            else:
                found[name] = ranked
            tell(None)
    parts = ranks.gather((found, missing))
    found = {name: ranked for part, _ in parts for name, ranked in part.items()}
    missing = {name: reason for _, part in parts for name, reason in part.items()}
    missing = {name: missing[name] for name in photos if name in missing}
    status = 0
    if ranks.rank == 0:
        status = report(out / RESULT, settings, subsets, ranks_by_subset(subsets, found), missing)
    return ranks.gather(status)[0]  # torchrun ends all processes as soon as one fails: not before the result is written


def _photo_folder(folder: str | None, photos: Sequence[str]) -> str:
    """The folder of photos, which holds one of them at least."""
    from selectivit.openvocab.region_ranking import find_region_photo

    if folder is None:
        raise ValueError("expected the photos' folder, COCO's val2017 for FG-OVD: give it by --images FOLDER")
    if not Path(folder).is_dir():
        raise ValueError(f"there is no folder {folder}: give the photos' folder by --images FOLDER")
    if not any(find_region_photo(folder, name).is_file() for name in photos):
        raise ValueError(f"none of {len(photos)} photos is in {folder}: expected files such as {photos[0]}")
    return folder


def _ranked(
    path: Path,
    regions: Sequence[Region],
    clip: tuple[Any, Any],
    settings: dict[str, Any],
    journal: Journal,
    more: dict[str, Any],
) -> list[int] | str:
    """The ranks of a photo's regions, or why there are none."""
    from selectivit.openvocab.region_ranking import rank_photo, region_photo

    try:
        picture = region_photo(path, regions)
        key = key_of(settings, file_digest(path), [asdict(region) for region in regions])
    except (ValueError, OSError) as error:
        return str(error)
    kept = journal.get(key)
    if kept is None:
        kept = within_memory(partial(rank_photo, clip, picture, regions, **more))
        if kept is None:
            return f"{path}: not enough memory: {ADVICE}"
        journal.add(key, kept)
    return kept


def _settings(where: RunOptions, what: RegionOptions, preset: Any, model: Any) -> dict[str, Any]:
    """Gather all that the ranks depend on beside photos and regions."""
    from selectivit import __version__
    from selectivit.openvocab.prompts import find_templates

    return {
        "selectivit": __version__,
        "model": where.model,
        "weights_sha256": tensors_digest(model.state_dict()),
        "protocol": what.protocol,
        "preset": what.preset if what.protocol == "roialign" else None,
        "preset_settings": asdict(preset) if what.protocol == "roialign" else None,
        "size": what.size if what.protocol == "roialign" else None,
        "templates": list(find_templates(what.templates)),
    }
