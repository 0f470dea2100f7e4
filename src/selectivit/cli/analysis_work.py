"""The loop of an analysis: each photo through each model, read in each way; results are noted as they come."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from selectivit.cli.analysis_kinds import Cell
from selectivit.cli.analysis_options import ReadingOptions
from selectivit.cli.analysis_results import Counts, Spread, Study
from selectivit.cli.journal import Journal, key_of
from selectivit.cli.memory import ADVICE, within_memory
from selectivit.data.digest import tensors_digest

if TYPE_CHECKING:
    import torch
    from PIL import Image
    from torch import Tensor, nn

    from selectivit.data.segmentation import SegmentationData
    from selectivit.eval.diffuseness import Diffuseness
    from selectivit.openvocab.segmenter import OpenVocabularySegmenter


@dataclass(frozen=True)
class Work:
    """What all models have in common.

    Args:
        data: photos and masks.
        places: the numbers of this process's photos.
        journal: of earlier results.
        study: filled as the work goes on.
        reading: words and background; None where nothing is segmented.
        device: where models are put.
        tell: called with a line to print, or None, after each photo of each model.
    """

    data: SegmentationData
    places: Sequence[int]
    journal: Journal
    study: Study
    reading: ReadingOptions | None
    device: torch.device
    tell: Callable[[str | None], None]

    def run(self, model_name: str, cells: Sequence[tuple[int, Cell]], spread: Spread | None) -> None:
        """Study one model.

        Args:
            model_name: as `load_clip` takes it, or `load_model` where nothing is segmented.
            cells: those of this model, with their numbers.
            spread: what to measure of its attention.

        Raises:
            ValueError: an unknown model, one without a text tower where it must segment, settings that it cannot take.
            WriteError: no space.
        """
        from selectivit.data.images import ImageError

        model, tokenizer = self._load(model_name)
        weights = tensors_digest(model.state_dict())
        ways = [(number, self._segmenter(model, tokenizer, cell)) for number, cell in cells]
        for place in self.places:
            try:
                image, mask = self.data.image(place), self.data.mask(place)
            except (ImageError, OSError) as error:
                self._skip(place, str(error))
                continue
            photo = _photo_key(image, mask)
            work = partial(self._photo, place, image, mask, (weights, photo), model_name, model, ways, spread)
            if within_memory(work) is None:
                self._skip(place, f"{self.data.name_of(place)}: not enough memory: {ADVICE}")
            else:
                self.tell(None)

    def _load(self, name: str) -> tuple[nn.Module, Any]:
        if self.reading is None:
            from selectivit.models.weights import load_model

            return load_model(name, device=self.device), None
        from selectivit.models.clip import load_clip

        return load_clip(name, device=self.device)

    def _skip(self, place: int, reason: str) -> None:
        told = place in self.study.skipped
        self.study.skipped[place] = reason
        self.tell(None if told else f"skipped: {reason}")

    def _segmenter(self, model: nn.Module, tokenizer: Any, cell: Cell) -> OpenVocabularySegmenter:
        from selectivit.openvocab.evaluate import segmenter_for

        assert self.reading is not None  # cells are made only where something is segmented
        how = {name: getattr(self.reading, name) for name in ("background", "threshold", "templates")}
        return segmenter_for((model, tokenizer), self.data, cell.preset, **how)

    def _photo(
        self,
        place: int,
        image: Image.Image,
        mask: Tensor,
        known: tuple[str, str],
        model_name: str,
        model: nn.Module,
        ways: Sequence[tuple[int, OpenVocabularySegmenter]],
        spread: Spread | None,
    ) -> bool:
        """One photo through one model; True at the end."""
        for number, segmenter in ways:
            key = key_of("confusion", *known, _describe(segmenter))
            pairs = self.journal.get(key)
            if pairs is None:
                pairs = _pairs(segmenter, image, mask)
                self.journal.add(key, pairs)
            self.study.counts.setdefault(number, {})[place] = pairs
        if spread is not None:
            found = self._spread(image, mask, known, model, spread)
            self.study.spread.setdefault(model_name, {})[place] = found
        return True

    def _spread(
        self, image: Image.Image, mask: Tensor, known: tuple[str, str], model: nn.Module, spread: Spread
    ) -> Diffuseness:
        import torch

        from selectivit.data.transforms import to_tensor
        from selectivit.eval.diffuseness import Diffuseness, diffuseness
        from selectivit.features import preprocessing

        background = 0 if self.data.classes[0].casefold() == "background" else None
        rules = [[rule.normalizer, rule.alpha, rule.scores] for rule in spread.rules]
        key = key_of("diffuseness", *known, rules, spread.layers, spread.size, background)
        kept = self.journal.get(key)
        if kept is None:
            fit = preprocessing(model)
            size = min(fit.image_size) if spread.size is None else spread.size
            pixels = to_tensor(image, mean=fit.mean, std=fit.std, patch_size=fit.patch_size, size=size)
            pixels = pixels.to(self.device, next(model.parameters()).dtype)
            found = diffuseness(model, pixels, mask, spread.rules, spread.layers, background=background)
            kept = [list(found.layers), found.queries, found.sums.tolist()]
            self.journal.add(key, kept)
        layers, queries, sums = kept
        return Diffuseness(tuple(layers), torch.tensor(sums, dtype=torch.float64), queries)


def _describe(segmenter: OpenVocabularySegmenter) -> list[Any]:
    """All that a segmentation depends on beside weights and photo."""
    from selectivit import __version__

    words = [list(label.words) for label in segmenter.labels]
    more = [list(segmenter.templates), segmenter.threshold, segmenter.has_background]
    return [__version__, asdict(segmenter.preset), words, *more]


def _photo_key(image: Image.Image, mask: Tensor) -> str:
    digest = hashlib.sha256(f"{image.size} {tuple(mask.shape)}".encode())
    digest.update(image.tobytes())
    digest.update(mask.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _pairs(segmenter: OpenVocabularySegmenter, image: Image.Image, mask: Tensor) -> Counts:
    from selectivit.openvocab.evaluate import count_confusion

    counts = count_confusion(segmenter.index_map(image), mask, len(segmenter.labels)).flatten()
    places = counts.nonzero()[:, 0]
    return [[int(place), int(counts[place])] for place in places]
