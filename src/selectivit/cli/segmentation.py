"""The loop over photos to segment: read, segment, write; one bad photo stops none of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selectivit.cli.jobs import Outcome, Photo, each_photo
from selectivit.cli.segment_files import kept_entry, save_segmentation
from selectivit.data.digest import file_digest

if TYPE_CHECKING:
    from selectivit.openvocab.segmenter import OpenVocabularySegmenter


@dataclass(frozen=True)
class SegmentationJob:
    """How one job turns photos into files.

    Args:
        segmenter: with its labels and preset.
        out: the job's folder.
        settings: all that the result depends on beside the photo.
        outcome: filled as the work goes on, so that an interruption finds it.
        tell: called with a line to print, or None, after each photo.
    """

    segmenter: OpenVocabularySegmenter
    out: Path
    settings: dict[str, Any]
    outcome: Outcome
    tell: Callable[[str | None], None]

    def run(self, photos: Iterable[Photo]) -> None:
        """Work through the photos.

        Args:
            photos: in the order of reading.
        """
        each_photo(photos, self._segment, self.outcome, self.tell, "segment")

    def _segment(self, photo: Photo) -> dict[str, Any]:
        from dataclasses import replace

        from selectivit.data.images import read_image

        digest = file_digest(photo.path)
        entry = kept_entry(photo, self.out, self.settings, digest)
        if entry is not None:
            return entry
        read = read_image(photo.path)
        found = self.segmenter(read.image)
        found = replace(found, notes=(*read.notes, *found.notes))
        return save_segmentation(photo, self.out, self.settings, digest, found, read.image)
