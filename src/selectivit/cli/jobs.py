"""What commands over many photos share: finding them, putting ranks' outcomes together, and the job's index."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from selectivit.cli.memory import ADVICE, within_memory
from selectivit.cli.naming import beside_others, name_outputs
from selectivit.cli.ranks import Ranks
from selectivit.data.digest import file_digest
from selectivit.data.writing import WriteError, write_json

COMPANIONS = {
    ".pca.png": ".safetensors",
    ".compare.png": ".compare.json",
    ".segment.png": ".segment.json",
    ".index.png": ".segment.json",
    ".budgets.png": ".cores.json",
    ".attention.png": ".cores.json",
    ".paths.png": ".cores.json",
    ".listening.png": ".cores.json",
    "umap.png": "umap.json",
}
"""How the pictures that commands write end, and what then lies beside them."""


@dataclass(frozen=True)
class Photo:
    """One photo of a job.

    Args:
        path: where it lies.
        name: of its outputs, relative to the job's folder, without a suffix.
    """

    path: Path
    name: str


@dataclass
class Outcome:
    """What became of the photos.

    Args:
        done: their entries of the index.
        skipped: the source and the reason of those that could not be read.
        stopped: why the work ended early.
    """

    done: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)
    stopped: str | None = None


def find_photos(
    paths: Sequence[str], outcome: Outcome, holds_another: Callable[[Photo], bool], *, first: bool
) -> list[Photo]:
    """Find the photos, in an order that all ranks agree on; what is not there is noted by the first rank alone.

    Args:
        paths: photos, and folders that are searched.
        outcome: what is not there is added to its skipped ones.
        holds_another: whether a photo's outputs would replace another photo's.
        first: whether this is the first rank.

    Returns:
        The photos; pictures that an earlier run left among them are none.

    Raises:
        ValueError: there is none.
    """
    from selectivit.data.find import find_images

    found, problems = find_images(paths)
    if first:
        outcome.skipped += [{"source": None, "reason": problem} for problem in problems]
        for problem in problems:
            print(f"skipped: {problem}", file=sys.stderr)
    found = [image for image in found if not _is_ours(image.path)]
    if not found:
        raise ValueError("no photo to work on: expected image files, or folders that hold some")
    names = name_outputs([(image.root, image.path) for image in found])
    names = beside_others(names, lambda i, name: holds_another(Photo(found[i].path, name)))
    return [Photo(image.path, name) for image, name in zip(found, names, strict=True)]


def _is_ours(path: Path) -> bool:
    """Tell a picture that an earlier run left in the folder from a photo."""
    return any(
        path.name.endswith(end) and path.with_name(path.name.removesuffix(end) + beside).is_file()
        for end, beside in COMPANIONS.items()
    )


def merge(parts: Sequence[Outcome], photos: Sequence[Photo]) -> Outcome:
    """Put the ranks' outcomes together in the order of the photos, whatever the order of the work.

    Args:
        parts: one a rank.
        photos: all of them.

    Returns:
        The whole.
    """
    place = {str(photo.path): i for i, photo in enumerate(photos)}

    def order(entry: dict[str, Any]) -> int:
        return place.get(entry["source"], -1)

    done = sorted((entry for part in parts for entry in part.done), key=order)
    skipped = sorted((entry for part in parts for entry in part.skipped), key=order)
    return Outcome(done, skipped, next((part.stopped for part in parts if part.stopped), None))


def write_index(
    path: Path, settings: dict[str, Any], outcome: Outcome, photos: Sequence[Photo], files: Sequence[str]
) -> None:
    """Write the job's index: settings, photos (also of earlier runs into the same folder), what was skipped and why.

    Args:
        path: the JSON file.
        settings: all that the results depend on beside the photo.
        outcome: of all ranks; a full disk is noted in it.
        photos: all of them.
        files: the keys of an entry that name its files; the first tells entries apart.
    """
    whole = merge([outcome], photos)
    earlier = _earlier(path, settings, {entry[files[0]] for entry in whole.done}, files)
    content = {"settings": settings, "photos": earlier + whole.done}
    content |= {"skipped": whole.skipped, "stopped": whole.stopped}
    try:
        write_json(path, content)
    except WriteError as error:
        outcome.stopped = str(error)
        print(f"stopped: {error}", file=sys.stderr)


def each_photo(
    photos: Iterable[Photo],
    work: Callable[[Photo], dict[str, Any]],
    outcome: Outcome,
    tell: Callable[[str | None], None],
    what: str,
) -> None:
    """Go through photos one by one; one bad photo stops none of the others, a full disk stops all.

    Args:
        photos: in the order of reading.
        work: gives a photo's entry of the index.
        outcome: filled as the work goes on, so that an interruption finds it.
        tell: called with a line to print, or None, after each photo.
        what: is done to a photo, a verb, to say what memory did not suffice for.
    """
    from selectivit.data.images import ImageError

    def skip(photo: Photo, reason: str) -> None:
        outcome.skipped.append({"source": str(photo.path), "reason": reason})
        tell(f"skipped: {reason}")

    for photo in photos:
        try:
            entry = within_memory(partial(work, photo))
        except WriteError as error:  # the next photo would meet the same full disk
            outcome.stopped = str(error)
            tell(f"stopped: {error}")
            return
        except (ImageError, OSError) as error:
            skip(photo, str(error))
            continue
        if entry is None:
            skip(photo, f"{photo.path}: not enough memory to {what} it: {ADVICE}")
        else:
            outcome.done.append(entry)
            tell(None)


def work_through(
    work: Callable[[], None],
    index: Path,
    settings: dict[str, Any],
    outcome: Outcome,
    photos: Sequence[Photo],
    files: Sequence[str],
    ranks: Ranks,
) -> None:
    """Do a process's share; an interruption leaves the index of what is done.

    Args:
        work: fills the outcome.
        index: the JSON file.
        settings: all that the results depend on beside the photo.
        outcome: of this process.
        photos: all of them.
        files: as for `write_index`.
        ranks: the processes.

    Raises:
        KeyboardInterrupt: Ctrl-C.
    """
    try:
        work()
    except KeyboardInterrupt:
        outcome.stopped = "interrupted"
        if ranks.size == 1:
            write_index(index, settings, outcome, photos, files)
        raise


def finish(
    index: Path,
    settings: dict[str, Any],
    outcome: Outcome,
    photos: Sequence[Photo],
    files: Sequence[str],
    ranks: Ranks,
) -> int:
    """Put the ranks' outcomes together, write the index, say what was done.

    Args:
        index: the JSON file.
        settings: all that the results depend on beside the photo.
        outcome: of this process.
        photos: all of them.
        files: as for `write_index`.
        ranks: the processes; each waits here for the others.

    Returns:
        The exit status: 0 all done, 1 something was skipped, 2 nothing could be done.
    """
    whole = merge(ranks.gather(outcome), photos)
    if ranks.rank == 0:
        write_index(index, settings, whole, photos, files)
        kept = sum(entry["state"] == "kept" for entry in whole.done)
        print(f"{len(whole.done)} done ({kept} kept), {len(whole.skipped)} skipped: {index}")
    # torchrun ends all processes as soon as one fails: not before the index is written.
    stopped = any(ranks.gather(whole.stopped))
    return (1 if whole.done else 2) if stopped or whole.skipped else 0


def is_others(photo: Photo, source: Any, digest: Any) -> bool:
    """Whether results made from `source`, whose content had the digest, are another photo's than this one's.

    Args:
        photo: the photo.
        source: the path that the results name.
        digest: `file_digest` of what it held then.

    Returns:
        False for the same path (the photo may have been edited since), the same content (it may have been moved), and
        a photo that cannot be read, which is skipped later.
    """
    if os.path.abspath(str(source)) == os.path.abspath(photo.path):
        return False
    try:
        return digest != file_digest(photo.path)
    except OSError:
        return False


def _earlier(path: Path, settings: dict[str, Any], done: set[str], files: Sequence[str]) -> list[dict[str, Any]]:
    """The entries of earlier runs into the same folder, whose files are still there and were not written anew."""
    if not path.is_file():
        return []
    try:
        index = json.loads(path.read_text())
        entries = [entry for entry in index["photos"] if entry[files[0]] not in done]
        there = [e for e in entries if all((path.parent / e[key]).is_file() for key in files)]
        theirs = {} if index["settings"] == settings else {"settings": index["settings"]}  # said where they differ
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        print(f"note: {path} could not be read: what earlier runs wrote is not listed in the new one", file=sys.stderr)
        return []
    found = [{**theirs, **entry, "state": "earlier"} for entry in there]
    for entry in found:
        if entry.get("settings") == settings:
            del entry["settings"]
    return found
