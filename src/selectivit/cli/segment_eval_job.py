"""The loop over pictures to score: read, segment, count; one bad picture stops none of the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from selectivit.cli.memory import ADVICE, within_memory
from selectivit.cli.segment_eval_parts import Part

if TYPE_CHECKING:
    from torch import Tensor

    from selectivit.data.segmentation import SegmentationData
    from selectivit.openvocab.segmenter import OpenVocabularySegmenter

SAVE_SECONDS = 15.0


@dataclass
class ScoringJob:
    """How one process scores its share.

    Args:
        segmenter: for the data set's classes.
        data: the data set.
        part: what this process counted, in earlier runs too; grows.
        save: writes the part.
        tell: called with a line to print, or None, after each picture.
        workers: processes that read.
        skipped: pictures that could not be used, and why.
    """

    segmenter: OpenVocabularySegmenter
    data: SegmentationData
    part: Part
    save: Callable[[Part], None]
    tell: Callable[[str | None], None]
    workers: int = 0
    skipped: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.before = self.part

    @property
    def new(self) -> Part:
        """What this run counted."""
        old, now = self.before, self.part
        return replace(
            now,
            confusion=now.confusion - old.confusion,
            done=now.done[len(old.done) :],
            void=now.void[len(old.void) :],
        )

    def run(self, numbers: Sequence[int]) -> None:
        """Work through pictures; what is counted is saved now and then, and at the end, whatever ends it.

        Args:
            numbers: of the pictures.

        Raises:
            WriteError: no space, no permission.
        """
        from selectivit.openvocab.evaluate import check_fits, read_ahead

        check_fits(self.segmenter, self.data)
        saved, written = self.part, time.monotonic()
        try:
            for number, image, mask in read_ahead(self.data, numbers, self.workers):
                self._score(number, image, mask)
                if time.monotonic() - written > SAVE_SECONDS:
                    self.save(self.part)
                    saved, written = self.part, time.monotonic()
        finally:
            if self.part is not saved:
                self.save(self.part)

    def _score(self, number: int, image: Any, mask: Tensor | Exception) -> None:
        if isinstance(mask, Exception):
            self._skip(number, str(mask))
            return
        found = within_memory(partial(self._confusion, image, mask))
        if found is None:
            self._skip(number, f"{self.data.pairs[number][1]}: not enough memory to segment it: {ADVICE}")
            return
        self.part = self.part.plus(number, found)
        self.tell(None)

    def _confusion(self, image: Any, mask: Tensor) -> Tensor:
        from selectivit.openvocab.evaluate import count_confusion

        return count_confusion(self.segmenter.index_map(image), mask, len(self.data.classes))

    def _skip(self, number: int, reason: str) -> None:
        name, source, _ = self.data.pairs[number]
        self.skipped.append({"name": name, "source": str(source), "reason": reason})
        self.tell(f"skipped: {reason}")
