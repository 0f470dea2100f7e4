"""Two splits of labelled photos, and the features that probes of whole photos take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selectivit.cli.options import option
from selectivit.cli.probes.setting import Setting, photo_set

if TYPE_CHECKING:
    import torch

    from selectivit.data.image_folder import ImageFolder
    from selectivit.data.views import View
    from selectivit.eval.feature_cache import FeatureCache, PhotoSet

SIZE = 224


@dataclass(frozen=True)
class SplitOptions:
    """The splits of the data."""

    train_split: str = option("train", "NAME", "the split that is learnt from")
    val_split: str = option("val", "NAME", "the split that is scored")


def middle_crop(setting: Setting) -> View:
    """The view of DINO's evaluation: shorter side to 8/7 of the crop (256 for 224), middle crop."""
    from selectivit.data.views import View

    size = setting.what.size or SIZE
    return View("centre", size, resize=round(size * 256 / 224))


@dataclass
class LabelledPhotos:
    """Two splits of a folder of classes.

    Args:
        train: the split that is learnt from.
        val: the split that is scored.
        sets: the photos of both, for the cache.
        problems: what could not be read, and why.
    """

    train: ImageFolder
    val: ImageFolder
    sets: tuple[PhotoSet, PhotoSet]
    problems: dict[str, str] = field(default_factory=dict)

    @classmethod
    def open(cls, root: Path, splits: SplitOptions) -> LabelledPhotos:
        """Find the photos of both splits.

        Raises:
            ValueError: no such split, one class only, or splits of different classes.
        """
        from selectivit.data.image_folder import check_same_classes, open_image_folder

        train, val = (open_image_folder(root, split) for split in (splits.train_split, splits.val_split))
        check_same_classes(train, val)
        sets = [photo_set([Path(p) for p in s.photos.paths], root, s.split) for s in (train, val)]
        return cls(train, val, (sets[0], sets[1]))

    @property
    def num_classes(self) -> int:
        """How many classes there are."""
        return len(self.train.classes)

    def describe(self, view: View) -> list[str]:
        """What is printed of it."""
        sizes = f"{self.train.split} {len(self.train)} photos, {self.val.split} {len(self.val)} photos"
        crop = f"shorter side {view.resize} px, middle crop {view.size} x {view.size} px"
        return [f"data: {self.train.root}, {self.num_classes} classes, {sizes}", f"seen: {crop}"]

    def record(self) -> dict[str, Any]:
        """What JSON holds of it."""
        return {
            part: {"split": split.split, "photos": len(split), "sha256": photos.digest}
            for part, split, photos in zip(("train", "val"), (self.train, self.val), self.sets, strict=True)
        } | {"root": str(self.train.root), "classes": self.num_classes}

    def warm(self, cache: FeatureCache, view: View, layers: Sequence[int]) -> None:
        """Compute the features of some blocks in one pass."""
        for photos in self.sets:
            cache.blocks(photos, view, layers, "pooled")

    def features(self, setting: Setting, view: View, layers: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Features (n, D) and labels (n,) of both splits, photos that cannot be read left out."""
        return [self.of_split(i, setting, view, layers) for i in (0, 1)]

    def of_split(
        self, which: int, setting: Setting, view: View, layers: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Features (n, D) and labels (n,) of the training split (0) or the other (1)."""
        import torch

        from selectivit.eval.token_table import TokenTable

        blocks = setting.cache.blocks(self.sets[which], view, layers, "pooled")
        self.problems |= blocks[0].problems
        labels = torch.tensor((self.train, self.val)[which].labels)[torch.tensor(blocks[0].readable)]
        table = TokenTable(blocks, setting.what.tokens)
        return table.rows(torch.arange(table.num_rows)).to(setting.device), labels.to(setting.device)
