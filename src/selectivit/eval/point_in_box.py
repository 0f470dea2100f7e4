"""Point-in-Box: whether the patch that is most like the class token lies on the object."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from selectivit.data.boxes import Box, boxes_in_crop
from selectivit.features import Features

PROTOCOL = (
    "Point-in-Box: a patch's score is the cosine of its token and the class token; the metric is the share of photos "
    "whose best patch has its centre in the object's box. Public code takes photos of one object whose box is under "
    "25 % of the photo, resizes the shorter side to 256 px and cuts out the middle 224 px"
)

OBJECTS = ("one", "any")
AGAINST = ("cls", "mean")


@dataclass(frozen=True)
class Rules:
    """Which photos count, and how they are seen.

    Args:
        objects: "one": photos of one object; "any": of several too, and the patch may lie in any of their boxes.
        max_area: photos whose boxes cover this share of the photo or more are left out; 1 keeps all.
        labels: objects of these kinds alone; None all.
        resize: of the photo's shorter side, pixels.
        size: of the middle crop's sides, pixels.

    Raises:
        ValueError: another word, an area that is none, a crop larger than the resized photo.
    """

    objects: str = "one"
    max_area: float = 0.25
    labels: frozenset[str] | None = None
    resize: int = 256
    size: int = 224

    def __post_init__(self) -> None:
        if self.objects not in OBJECTS:
            raise ValueError(f"expected objects {' or '.join(OBJECTS)}, got {self.objects!r}")
        if not 0 < self.max_area <= 1:
            raise ValueError(f"expected a largest area over 0 and up to 1 (the whole photo), got {self.max_area}")
        if not 1 <= self.size <= self.resize:
            raise ValueError(
                f"expected a crop of 1 to {self.resize} px (what the photo is resized to), got {self.size}"
            )


@dataclass(frozen=True)
class Target:
    """Where a photo's best patch should lie.

    Args:
        boxes: (n, 4), left, top, right, bottom in the crop's pixels.
        inside: (h, w) bool, the patches whose centre lies in a box.
    """

    boxes: Tensor
    inside: Tensor

    @property
    def chance(self) -> float:
        """The share of patches that would be right: what a patch drawn at random scores."""
        return self.inside.double().mean().item()


def target(boxes: Sequence[Box], image_size: tuple[int, int], rules: Rules, patch_size: int) -> Target | str:
    """Where the best patch of a photo should lie, or why the photo does not count.

    Args:
        boxes: of the photo.
        image_size: its (width, height).
        rules: which photos count.
        patch_size: pixels.

    Returns:
        The target, or the reason in a few words.

    Example:
        >>> found = target([Box("dog", 0, 0, 20, 20)], (64, 64), Rules(resize=64, size=64), patch_size=16)
        >>> found.inside.int().tolist()
        [[1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    """
    wanted = [box for box in boxes if rules.labels is None or box.label in rules.labels]
    if not wanted:
        return "no object"
    if rules.objects == "one" and len(wanted) > 1:
        return "several objects"
    if rules.max_area < 1 and _share(wanted, image_size) >= rules.max_area:
        return f"box over {100 * rules.max_area:g} % of the photo"
    seen = boxes_in_crop(wanted, image_size, resize=rules.resize, size=rules.size)
    if not len(seen):
        return "box outside the middle crop"
    inside = _patches_inside(seen, rules.size // patch_size, patch_size)
    return Target(seen, inside) if inside.any() else "box without a patch's centre"


def _share(boxes: Sequence[Box], image_size: tuple[int, int]) -> float:
    """The share of the photo that boxes cover together."""
    width, height = image_size
    if len(boxes) == 1:
        return (boxes[0].right - boxes[0].left) * (boxes[0].bottom - boxes[0].top) / (width * height)
    covered = torch.zeros(height, width, dtype=torch.bool)
    for box in boxes:
        covered[round(box.top) : round(box.bottom), round(box.left) : round(box.right)] = True
    return covered.double().mean().item()


def _patches_inside(boxes: Tensor, side: int, patch_size: int) -> Tensor:
    centres = (torch.arange(side, dtype=boxes.dtype) + 0.5) * patch_size
    left, top, right, bottom = boxes.T[..., None]  # each (n, 1)
    columns, rows = (left <= centres) & (centres < right), (top <= centres) & (centres < bottom)  # (n, side)
    return (rows[:, :, None] & columns[:, None, :]).any(0)


def patch_scores(found: Features, against: str = "cls") -> Tensor:
    """The cosine of every patch and the class token.

    Args:
        found: of one block.
        against: "cls"; or "mean", the mean of the patches, for models without a class token.

    Returns:
        (B, h, w) float32.

    Raises:
        ValueError: another word, or a model without a class token.

    Example:
        >>> tokens = torch.eye(4)[None]
        >>> found = Features(tokens.mT.unflatten(2, (2, 2)), tokens, tokens[:, 2], None, None, (2, 2))
        >>> patch_scores(found).tolist()
        [[[0.0, 0.0], [1.0, 0.0]]]
    """
    if against not in AGAINST:
        raise ValueError(f"expected patches against {' or '.join(AGAINST)}, got {against!r}")
    whole = found.cls if against == "cls" else found.patch_tokens.float().mean(1)
    if whole is None:
        raise ValueError("the model has no class token: compare with the patches' mean (--against mean)")
    scores = torch.cosine_similarity(found.patch_tokens.float(), whole[:, None].float(), dim=-1)  # (B, N)
    return scores.unflatten(1, found.grid)


@dataclass(frozen=True)
class Score:
    """Point-in-Box of one block.

    Args:
        hits: photos whose best patch lies in a box.
        photos: that count.
    """

    hits: int
    photos: int

    @property
    def share(self) -> float:
        """The metric, 0..1."""
        return self.hits / self.photos

    def interval(self, z: float = 1.96) -> tuple[float, float]:
        """Wilson's interval for the share, which holds for few photos and for shares of 0 and 1 too.

        Args:
            z: 1.96 for 95 %.

        Returns:
            Its ends.

        Example:
            >>> [round(end, 3) for end in Score(5, 10).interval()]
            [0.237, 0.763]
        """
        n, p = self.photos, self.share
        middle, wide = (p + z * z / (2 * n)), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return max(0.0, (middle - wide) / (1 + z * z / n)), min(1.0, (middle + wide) / (1 + z * z / n))
