"""Segmentation by typed words: an overlay, and what each patch was taken for with which score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from selectivit.data.scene_layouts import CLASSES
from selectivit.demo.memory import Memory
from selectivit.demo.photo import Photo
from selectivit.demo.shelf import Shelf, embedded_clips
from selectivit.openvocab.presets import Preset, find_preset
from selectivit.openvocab.segmenter import OpenVocabularySegmenter
from selectivit.vis.overlay import blend, palette
from selectivit.vis.pixels import picture_png

if TYPE_CHECKING:
    from selectivit.openvocab.segmenter import Segmentation

MOST_LABELS = 64
NAMED = 3
"""Classes that are named where the pointer is."""
SUGGESTED = {"scenes": ", ".join(CLASSES)}
"""What a model that comes with the package knows the words for."""
USUAL = "person|man|woman, cat|kitten, cup|mug, sky, wall, table"

NO_CLIP = (
    "No CLIP is chosen. Segmentation needs a model of pictures and words: type the name of one, such as "
    "open_clip:ViT-B-16/openai (600 MB, fetched from its hub once) or openai/clip-vit-base-patch16, or a folder that "
    "open_clip or transformers wrote; or start the page with --clip NAME."
)


@dataclass(frozen=True)
class Words:
    """A segmented photo.

    Args:
        picture: the photo under the classes' colours, PNG.
        shape: its height and width, pixels.
        names: of the classes.
        colours: of the classes, "#rrggbb".
        shares: of the picture that each class takes, 0..1.
        best: the likeliest classes of each patch, the first first, (h, w, k).
        scores: their probabilities, (h, w, k).
        notes: what was done to the photo.
    """

    picture: bytes
    shape: tuple[int, int]
    names: tuple[str, ...]
    colours: tuple[str, ...]
    shares: tuple[float, ...]
    best: Tensor
    scores: Tensor
    notes: tuple[str, ...]


def default_clip(asked: str | None) -> str:
    """The CLIP that the page begins with.

    Args:
        asked: for at the start, or None.

    Returns:
        Its name: the one asked for, else the first that comes with the package, else an empty text.

    Example:
        >>> default_clip("ViT-B-16/openai")
        'ViT-B-16/openai'
    """
    return asked or next(iter(embedded_clips()), "")


def default_labels(clip: str) -> str:
    """Words that a CLIP may know.

    Args:
        clip: its name.

    Returns:
        Labels with commas between.

    Example:
        >>> default_labels("scenes").startswith("ball, box")
        True
    """
    return SUGGESTED.get(clip, USUAL)


def split_labels(text: str) -> list[str]:
    """Read typed labels.

    Args:
        text: labels with commas or line breaks between; synonyms with bars between.

    Returns:
        The labels.

    Raises:
        ValueError: none, or too many.

    Example:
        >>> split_labels("road, car|truck,")
        ['road', 'car|truck']
    """
    labels = [label.strip() for label in text.replace("\n", ",").split(",") if label.strip()]
    if not labels:
        raise ValueError("expected one label or more with commas between, such as: road, car|truck, sky")
    if len(labels) > MOST_LABELS:
        raise ValueError(f"expected at most {MOST_LABELS} labels on this page, got {len(labels)}")
    return labels


def chosen_preset(name: str, alpha: float | Literal["auto"] | None) -> Preset:
    """A preset with another attention, where that is asked for.

    Args:
        name: of the preset.
        alpha: of entmax in place of the preset's normalizer; "auto" chooses it by photo and head; None keeps the
            preset's own.

    Returns:
        The preset.

    Raises:
        ValueError: an unknown name, or an alpha below 1.

    Example:
        >>> chosen_preset("sclip", 1.2).normalizer, chosen_preset("sclip", None).normalizer
        ('entmax', 'softmax')
    """
    preset = find_preset(name)
    return preset if alpha is None else replace(preset, normalizer="entmax", alpha=alpha)


def segment(
    shelf: Shelf, memory: Memory, photo: Photo, clip: str, labels: Sequence[str], preset: Preset, name: str
) -> Words:
    """Label every pixel of a photo.

    Args:
        shelf: of models.
        memory: of results.
        photo: the photo.
        clip: name of the CLIP.
        labels: classes, synonyms with bars between.
        preset: how the CLIP is read.
        name: of the preset, for what is remembered.

    Returns:
        The segmented photo.

    Raises:
        ValueError: no CLIP, or one that does not fit; labels that are alike.
        WeightsError: weights or a tokenizer that cannot be had.
    """
    clip = clip.strip()
    if not clip:
        raise ValueError(NO_CLIP)

    def compute() -> Words:
        with shelf.clip(clip) as pair:
            segmenter = OpenVocabularySegmenter(pair, labels, preset)
            found = segmenter(photo.image)
        return _drawn(photo, found)

    key = ("segment", photo.digest, shelf.check(clip), tuple(labels), name, preset.normalizer, preset.alpha)
    return memory.get(key, compute)


def _drawn(photo: Photo, found: Segmentation) -> Words:
    shown = torch.frombuffer(bytearray(photo.image.tobytes()), dtype=torch.uint8)
    shown = shown.view(photo.image.height, photo.image.width, 3).float() / 255
    colours = palette(len(found.names))
    top = found.scores.topk(min(NAMED, len(found.names)), dim=0)
    shares = found.shares()
    return Words(
        picture_png(blend(shown, found.index_map, colours)),
        (photo.image.height, photo.image.width),
        found.names,
        tuple("#{:02x}{:02x}{:02x}".format(*colour) for colour in colours.tolist()),
        tuple(shares[name] for name in found.names),
        top.indices.permute(1, 2, 0).contiguous(),
        top.values.permute(1, 2, 0).contiguous(),
        found.notes,
    )


def hover_data(words: Words) -> dict[str, Any]:
    """What the page needs to name the classes under the pointer.

    Args:
        words: the segmented photo.

    Returns:
        What JSON can hold: rows and columns, names, and for each patch in reading order its likeliest classes and
        their scores in per cent.
    """
    h, w, _ = words.best.shape
    return {
        "rows": h,
        "columns": w,
        "names": list(words.names),
        "best": words.best.flatten(0, 1).tolist(),
        "percent": [[round(100 * value, 1) for value in patch] for patch in words.scores.flatten(0, 1).tolist()],
    }
