"""Classes of photos that lie in one sub-folder a class, as ImageFolder has them."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset

from selectivit.data.photos import PhotoSource
from selectivit.data.training_images import centre_crops


def photo_classes(photos: PhotoSource, roots: Sequence[str | os.PathLike[str]]) -> list[str] | None:
    """The class of each photo: the first folder below the one that was given, in a tar shard too.

    Args:
        photos: as `open_photos` gives them.
        roots: the paths that were given to it.

    Returns:
        A name for each photo; None where a photo lies in no sub-folder, or all lie in one.

    Example:
        >>> from selectivit.data.photos import PhotoFiles
        >>> photo_classes(PhotoFiles(["data/cat/1.jpg", "data/dog/1.jpg"]), ["data"])
        ['cat', 'dog']
    """
    starts = sorted({os.path.join(str(root), "") for root in roots}, key=len, reverse=True)
    found: list[str] = []
    for index in range(len(photos)):
        name = photos.name(index)
        start = next((start for start in starts if name.startswith(start)), None)
        first, below, _ = name[len(start or "") :].partition("/")
        if start is None or not below:
            return None
        found.append(first)
    return found if len(set(found)) > 1 else None


class LabelledCrops(Dataset[tuple[int, Tensor | None, str]]):
    """The middles of labelled photos.

    Args:
        photos: where they come from.
        labels: the class of each.
        size: side of the crop, pixels.
    """

    def __init__(self, photos: PhotoSource, labels: Sequence[int], size: int):
        self.photos, self.labels, self.size = photos, list(labels), size

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[int, Tensor | None, str]:
        """One.

        Args:
            index: its number.

        Returns:
            Its class, (3, size, size) uint8, and ""; or None and why it cannot be read.
        """
        crops, skipped = centre_crops(self.photos, [index], self.size)
        return self.labels[index], crops[0] if crops else None, skipped[0][1] if skipped else ""


def collate_labelled(samples: Sequence[tuple[int, Tensor | None, str]]) -> tuple[Tensor, Tensor] | None:
    """Put crops into a batch.

    Args:
        samples: as `LabelledCrops` gives them.

    Returns:
        Crops (B, 3, size, size) uint8 and classes (B,); None where no photo can be read.
    """
    read = [(label, crop) for label, crop, _ in samples if crop is not None]
    if not read:
        return None
    return torch.stack([crop for _, crop in read]), torch.tensor([label for label, _ in read])
