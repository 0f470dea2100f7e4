"""`OpenVocabularySegmenter`: words and a picture in, a label for every pixel out; the CLIP behind it stays frozen."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from selectivit.openvocab.dense import dense_tokens, image_tower
from selectivit.openvocab.presets import Preset, find_preset
from selectivit.openvocab.prompts import Label, check_different, find_templates, parse_labels, text_features
from selectivit.openvocab.refine import refine
from selectivit.openvocab.windows import Rows, Window, averaged, blocks, sliding_windows, whole
from selectivit.swap.maps import available_memory
from selectivit.swap.sites import unwrap

if TYPE_CHECKING:
    from selectivit.data.images import LoadedImage

BACKGROUND = "background"
WINDOWS_AT_ONCE = 8
WINDOW_PATCHES = 1 << 20  # pictures under a sliding window may have this many patches


@dataclass(frozen=True)
class Segmentation:
    """What a picture was taken for.

    Args:
        index_map: (H, W) int32 at the picture's size, indices into `names`.
        names: of the classes; the first is "background" where background was asked for.
        scores: (classes, h, w) float32, each class's probability: the largest among its words.
        has_background: whether class 0 is background.
        notes: what was done to the picture on reading it.
    """

    index_map: Tensor
    names: tuple[str, ...]
    scores: Tensor
    has_background: bool
    notes: tuple[str, ...] = ()

    def shares(self) -> dict[str, float]:
        """The share of the pixels that each class takes, by name."""
        counts = torch.bincount(self.index_map.flatten(), minlength=len(self.names))
        return dict(zip(self.names, (counts / self.index_map.numel()).tolist(), strict=True))


class OpenVocabularySegmenter:
    """Label every pixel of a picture with one of the given words, by a frozen CLIP and without training.

    Args:
        clip: an open_clip model and tag ("ViT-B-16/openai"), a transformers id, a local folder; or a pair (model,
            tokenizer): for open_clip what `open_clip.get_tokenizer` gives, for transformers its tokenizer or processor.
        labels: classes, each with synonyms between bars: ["road", "person|man|woman"].
        preset: a name of `selectivit.openvocab.presets.PRESETS`, or a `Preset`.
        templates: a name ("imagenet80", "imagenet7", "photo", "none") or templates with one {}; None is the preset's.
        background: what becomes class 0, "background": True, pixels below the preset's threshold; words, pixels that
            resemble them most; False, none.
        threshold: probability below which a pixel is background, in place of the preset's.
        refine: draw edges to those of the picture (PAMR's idea; 10 rounds at distances of 8 and 16 pixels).
        device: where a model that is loaded by name is put; None is the CPU.

    Raises:
        ValueError: labels that are missing, empty or alike; an unknown name; a model whose patches and texts share no
            space; a threshold that can never be passed.
        WeightsError: weights or a tokenizer that cannot be loaded.

    Example:
        >>> segmenter = OpenVocabularySegmenter("ViT-B-16/openai", ["road", "car|truck"])  # doctest: +SKIP
        >>> segmenter("street.jpg").index_map.shape  # doctest: +SKIP
        torch.Size([1024, 2048])

    Source: entmax in a frozen CLIP, arXiv 2607.07135; the other presets name theirs.
    """

    def __init__(
        self,
        clip: str | os.PathLike[str] | tuple[nn.Module, Any],
        labels: Sequence[str],
        preset: str | Preset = "entmax-qq",
        *,
        templates: str | Sequence[str] | None = None,
        background: bool | str | Sequence[str] = False,
        threshold: float | None = None,
        refine: bool = False,
        device: str | torch.device | None = None,
    ):
        self.preset = find_preset(preset)
        self.labels, self.threshold = _classes(parse_labels(labels), self.preset, background, threshold)
        self.templates = find_templates(self.preset.templates if templates is None else templates)
        self.refine = refine
        self.model, self.tokenizer = _load(clip, device)
        self.tower = image_tower(self.model)
        self.has_background = self.labels[0].name == BACKGROUND
        self._expected = self.tower.host.preprocessing(self.tower.module)
        self._classes = [i for i, label in enumerate(self.labels) for _ in label.words]
        for side in (self.preset.window, self.preset.stride):
            if side is not None and side % self._expected.patch_size:
                raise ValueError(
                    f"window and stride must be multiples of the patch ({self._expected.patch_size} px), got "
                    f"{self.preset.window} and {self.preset.stride}"
                )
        check_different(self._texts(), [word for label in self.labels for word in label.words])

    @torch.no_grad()
    def __call__(self, image: Any, *, scores: str | tuple[int, int] = "patches") -> Segmentation:
        """Segment one picture.

        Args:
            image: a path, a PIL image, or a uint8 tensor (3, H, W), not normalised.
            scores: the resolution of the classes' probabilities: "patches", "image" (the picture's own size), or
                (height, width).

        Returns:
            The segmentation, on the CPU.

        Raises:
            ImageError: a file that is no picture.
            ValueError: a tensor of another kind, or an unknown resolution.
            MemoryError: scores of that size would not fit.
        """
        from selectivit.data.pictures import as_picture

        read = as_picture(image)
        target = (read.image.height, read.image.width)
        pixels, notes = self._ready(read)
        wanted = self._resolution(scores, target, tuple(pixels.shape[-2:]))
        rows, size = self._cosines(pixels, read)
        return Segmentation(
            self._index_map(rows, size, target),
            tuple(label.name for label in self.labels),
            self._scores(rows, size, wanted),
            self.has_background,
            (*read.notes, *notes),
        )

    @torch.no_grad()
    def index_map(self, image: Any) -> Tensor:
        """Segment one picture and give the labels alone, which leaves out the work for probabilities.

        Args:
            image: as for calling the segmenter.

        Returns:
            (H, W) int32 at the picture's size, on the CPU: the `index_map` that calling gives.

        Raises:
            ImageError: a file that is no picture.
            ValueError: a tensor of another kind.
        """
        from selectivit.data.pictures import as_picture

        read = as_picture(image)
        rows, size = self._cosines(self._ready(read)[0], read)
        return self._index_map(rows, size, (read.image.height, read.image.width))

    def _texts(self) -> Tensor:
        words = [word for label in self.labels for word in label.words]
        return text_features(self.model, self.tokenizer, words, self.templates)

    def _fit(self) -> dict[str, Any]:
        """How pictures are scaled, for `to_tensor` and `to_picture`."""
        expected, preset = self._expected, self.preset
        size = min(expected.image_size) if preset.size is None else preset.size
        bound = {} if preset.window is None else {"max_patches": WINDOW_PATCHES}
        return {"patch_size": expected.patch_size, "size": size, **bound}

    def _ready(self, read: LoadedImage) -> tuple[Tensor, tuple[str, ...]]:
        """The picture as the tower takes it, (3, H, W), on the tower's device."""
        from selectivit.data.transforms import target_size, to_tensor

        pixels = to_tensor(read.image, mean=self._expected.mean, std=self._expected.std, **self._fit())
        notes = target_size(read.image.size, **self._fit()).notes
        return pixels.to(next(self.tower.module.parameters()).device), notes

    def _resolution(
        self, scores: str | tuple[int, int], target: tuple[int, int], size: tuple[int, ...]
    ) -> tuple[int, int]:
        patch = self._expected.patch_size
        named = {"patches": (size[0] // patch, size[1] // patch), "image": target}
        wanted = named.get(scores) if isinstance(scores, str) else tuple(scores)
        if wanted is None or len(wanted) != 2 or min(wanted) < 1:
            raise ValueError(f"expected scores='patches', 'image' or (height, width), got {scores!r}")
        _check_memory(4 * len(self.labels) * wanted[0] * wanted[1], f"scores of {len(self.labels)} classes at {wanted}")
        return wanted[0], wanted[1]

    def _cosines(self, pixels: Tensor, read: LoadedImage) -> tuple[Rows, tuple[int, int]]:
        """Cosines between pixels and words over the scaled picture, row by row, and its size."""
        size, preset = (pixels.shape[1], pixels.shape[2]), self.preset
        parts: list[tuple[Window, Tensor]] = []
        windows, texts = sliding_windows(size, preset.window, preset.stride), self._texts()
        for start in range(0, len(windows), WINDOWS_AT_ONCE):
            some = windows[start : start + WINDOWS_AT_ONCE]
            crops = [pixels[:, w.top : w.top + w.height, w.left : w.left + w.width] for w in some]
            found = F.normalize(dense_tokens(self.model, torch.stack(crops), preset).map.float(), dim=1)
            if found.shape[1] != texts.shape[1]:
                raise ValueError(
                    f"patches have {found.shape[1]} channels and texts {texts.shape[1]}: the towers share no space"
                )
            cosines = torch.einsum("qe,behw->bqhw", texts, found)
            parts += zip(some, cosines, strict=True)
        rows = averaged(parts, size[1])
        return (self._refined(rows, size, read) if self.refine else rows), size

    def _refined(self, rows: Rows, size: tuple[int, int], read: LoadedImage) -> Rows:
        from selectivit.data.transforms import to_picture

        _check_memory(8 * len(self._classes) * size[0] * size[1], f"refining {len(self._classes)} maps at {size}")
        maps = rows(0, size[0])
        shown = torch.from_numpy(to_picture(read.image, **self._fit())).permute(2, 0, 1).to(maps) / 255
        return whole(refine(maps, shown))

    def _scale(self) -> float:
        if self.preset.logit_scale is not None:
            return self.preset.logit_scale
        return float(unwrap(self.model).logit_scale.detach().float().exp())  # pyright: ignore[reportCallIssue]

    def _index_map(self, rows: Rows, size: tuple[int, int], target: tuple[int, int]) -> Tensor:
        """(H, W): the class of the likeliest word, or background where that is not likely enough."""
        found = torch.empty(target, dtype=torch.int32)
        scale = self._scale()
        for place, cosines in blocks(rows, size, target, len(self._classes)):
            best, word = cosines.max(0)
            label = torch.tensor(self._classes, dtype=torch.int32, device=word.device)[word]
            if self.threshold is not None:
                probability = (scale * best - cosines.mul_(scale).logsumexp(0)).exp()
                label = label.masked_fill(probability < self.threshold, 0)
            found[place] = label.cpu()
        return found

    def _scores(self, rows: Rows, size: tuple[int, int], wanted: tuple[int, int]) -> Tensor:
        """(classes, h, w): softmax over all words, then the largest of each class's words."""
        found = torch.zeros(len(self.labels), *wanted)
        scale, owner = self._scale(), torch.tensor(self._classes)
        for place, cosines in blocks(rows, size, wanted, len(self._classes)):
            words = cosines.mul_(scale).softmax(0).cpu()
            index = owner.view(-1, 1, 1).expand_as(words)
            found[:, place] = found[:, place].scatter_reduce(0, index, words, "amax")
        return found


def _load(
    clip: str | os.PathLike[str] | tuple[nn.Module, Any], device: str | torch.device | None
) -> tuple[nn.Module, Any]:
    if isinstance(clip, (str, os.PathLike)):
        from selectivit.models.clip import load_clip

        return load_clip(clip, device="cpu" if device is None else device)
    if not isinstance(clip, (tuple, list)) or len(clip) != 2 or not isinstance(clip[0], nn.Module):
        raise ValueError(f"expected the name of a CLIP or a pair (model, tokenizer), got {type(clip).__name__}")
    model, tokenizer = clip
    if model.training:
        raise ValueError("the model is in training mode, where dropout makes every result another: call model.eval()")
    if not callable(tokenizer):
        raise ValueError(f"expected a tokenizer beside the model, got {type(tokenizer).__name__}")
    return model if device is None else model.to(device), tokenizer


def _classes(
    labels: tuple[Label, ...], preset: Preset, background: bool | str | Sequence[str], threshold: float | None
) -> tuple[tuple[Label, ...], float | None]:
    """The classes with background first, and the threshold, as they were asked for."""
    if threshold is not None and not 0 <= threshold <= 1:
        raise ValueError(f"threshold is a probability, got {threshold}")
    words: tuple[str, ...] = ()
    if background is True:
        threshold = preset.threshold if threshold is None else threshold
        if threshold is None:
            raise ValueError("this preset has no threshold for background: give threshold=, or background words")
    elif background:
        given = background.split("|") if isinstance(background, str) else list(background)
        parse_labels([*given, *("|".join(label.words) for label in labels)])
        words = tuple(" ".join(word.split()) for word in given)
    if threshold is None and not words:
        return labels, None
    if any(label.name.casefold() == BACKGROUND for label in labels):
        raise ValueError(f"a label is called {BACKGROUND!r}, as class 0 is: give its words as background= instead")
    if sum(len(label.words) for label in labels) + len(words) < 2:
        raise ValueError(
            "the probability of a single word is always 1, so no pixel falls below a threshold: give more labels, or "
            "words for the background"
        )
    return (Label(BACKGROUND, words), *labels), threshold


def _check_memory(needed: int, what: str) -> None:
    free = available_memory(torch.device("cpu"))
    if free is not None and needed > free:
        raise MemoryError(
            f"{what} need about {needed / 2**30:.1f} GiB while {free / 2**30:.1f} GiB are free: ask for a lower "
            "resolution or fewer labels"
        )
