"""What part of a photo a probe sees, and at what size: whole, its middle, or a random crop by number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from selectivit.data.seeding import derived_seed, seeded
from selectivit.data.transforms import to_tensor

KINDS = ("whole", "centre", "random")


@dataclass(frozen=True)
class View:
    """A view of a photo; the same photo and number always give the same tensor.

    Args:
        kind: "whole" (the shorter side scaled to `size`, then both to whole patches), "centre" (the shorter side scaled
            to `resize`, the middle `size` x `size` cut out) or "random" (a resized crop of 8 to 100 % of the area, and
            a flip, drawn by `seed`, `number` and the photo's place).
        size: pixels.
        resize: pixels; of "centre" only.
        seed: of "random" only.
        number: of "random" only: which of several views.

    Raises:
        ValueError: another kind, or sizes below 1.

    Example:
        >>> view = View("centre", size=28, resize=32)
        >>> view(Image.new("RGB", (90, 60)), 0, mean=(0.5,) * 3, std=(0.5,) * 3, patch_size=14).shape
        torch.Size([3, 28, 28])

    Source: the crops are those of DINO's evaluation, arXiv 2104.14294.
    """

    kind: str
    size: int
    resize: int = 0
    seed: int = 0
    number: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"expected a view of {', '.join(KINDS)}, got {self.kind!r}")
        if self.size < 1 or (self.kind == "centre" and self.resize < self.size):
            raise ValueError(f"expected sizes of 1 px or more, the crop within the resized photo, got {self}")

    def __call__(
        self, image: Image.Image, index: int, *, mean: Sequence[float], std: Sequence[float], patch_size: int
    ) -> Tensor:
        """One photo as a model takes it.

        Args:
            image: RGB.
            index: the photo's place in its data set.
            mean: the model's, per channel.
            std: the model's, per channel.
            patch_size: side of a patch, pixels.

        Returns:
            (3, H, W), normalised.

        Raises:
            ValueError: a crop that is not of whole patches.
        """
        if self.kind == "whole":
            return to_tensor(image, mean=mean, std=std, patch_size=patch_size, size=self.size)
        self.check(patch_size)
        if self.kind == "centre":
            resize = v2.Resize([self.resize], interpolation=v2.InterpolationMode.BICUBIC)
            cropped = v2.CenterCrop([self.size])(resize(image))
        else:
            with seeded(derived_seed(self.seed, "view", self.number, index)):
                crop = v2.RandomResizedCrop(self.size, interpolation=v2.InterpolationMode.BILINEAR)
                cropped = v2.RandomHorizontalFlip()(crop(image))
        pixels = v2.functional.to_dtype(v2.functional.pil_to_tensor(cropped), torch.float32, scale=True)
        return v2.functional.normalize(pixels, list(mean), list(std))

    def check(self, patch_size: int) -> None:
        """Refuse a crop that is not of whole patches.

        Raises:
            ValueError: it is not.
        """
        if self.kind != "whole":
            check_whole_patches(self.size, patch_size)

    def record(self) -> dict[str, Any]:
        """What JSON holds of it."""
        told = asdict(self)
        if self.kind != "centre":
            del told["resize"]
        if self.kind != "random":
            del told["seed"], told["number"]
        return told


def check_whole_patches(size: int, patch_size: int) -> None:
    """Refuse a crop that a model's grid does not fit.

    Args:
        size: side of the crop, pixels.
        patch_size: side of a patch, pixels.

    Raises:
        ValueError: it is no multiple.

    Example:
        >>> check_whole_patches(224, 14)
    """
    if size % patch_size:
        below = size // patch_size * patch_size
        near = f"{below} or {below + patch_size}" if below else str(patch_size)
        raise ValueError(
            f"a crop of {size} px does not fit the model's patches of {patch_size} px: expected whole patches, such as "
            f"{near}"
        )
