"""Photos of a Hugging Face dataset, on this machine or from the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from PIL import Image

from selectivit.data.images import ImageError, decode_image, read_image


class HubDataset:
    """The images of one split.

    Args:
        rows: a `datasets.Dataset`.
        title: what it is called in messages.

    Raises:
        ValueError: no column of images.
    """

    def __init__(self, rows: Any, title: str):
        import datasets

        columns = [name for name, kind in rows.features.items() if isinstance(kind, datasets.Image)]
        if not columns:
            raise ValueError(
                f"{title} has no column of images; its columns are {', '.join(map(str, rows.features)) or 'none'}"
            )
        self.column, self.title = columns[0], title
        # Undecoded: photos are decoded by the same rules wherever they come from.
        self.rows = rows.select_columns([self.column]).cast_column(self.column, datasets.Image(decode=False))

    @classmethod
    def from_disk(cls, folder: Path) -> HubDataset:
        """A dataset that `save_to_disk` wrote; of several splits, train.

        Args:
            folder: it lies in.

        Returns:
            Its photos.

        Raises:
            ValueError: it cannot be read, or holds no images.
        """
        datasets = _library()
        try:
            rows = datasets.load_from_disk(str(folder))
        except Exception as error:  # pyarrow's and the library's own errors alike
            raise ValueError(f"{folder} cannot be read as a saved dataset: {error}") from error
        if isinstance(rows, dict):
            if "train" not in rows:
                raise ValueError(f"{folder} has no split 'train': give the folder of one of {', '.join(rows)}")
            rows = rows["train"]
        return cls(rows, str(folder))

    @classmethod
    def from_hub(cls, name: str) -> HubDataset:
        """A dataset of the hub, or of its cache on this machine.

        Args:
            name: NAME or NAME:SPLIT; the split is train where none is given.

        Returns:
            Its photos.

        Raises:
            ValueError: it cannot be loaded, or holds no images.
        """
        datasets = _library()
        identifier, _, split = name.partition(":")
        try:
            rows = datasets.load_dataset(identifier, split=split or "train")
        except Exception as error:
            raise ValueError(f"hf:{name} cannot be loaded: {' '.join(str(error).split())[:300]}") from error
        return cls(rows, f"hf:{name}")

    def __len__(self) -> int:
        return len(self.rows)

    def name(self, index: int) -> str:
        """The dataset and the row's number."""
        return f"{self.title}[{index}]"

    def read(self, index: int, shorter_side: int | None = None) -> Image.Image:
        """Read and decode one row.

        Args:
            index: the row.
            shorter_side: a hint, as for `read_image`.

        Returns:
            8-bit RGB.

        Raises:
            ImageError: the row holds no image, or a damaged one.
        """
        value = self.rows[index][self.column]
        if not value or not (value.get("bytes") or value.get("path")):
            raise ImageError(f"{self.name(index)} holds no image")
        if value.get("bytes"):
            return decode_image(value["bytes"], self.name(index), shorter_side=shorter_side).image
        return read_image(value["path"], shorter_side=shorter_side).image


def is_saved_dataset(path: Path) -> bool:
    """Tell a folder that `datasets.save_to_disk` wrote from one of photos."""
    return any((path / name).is_file() for name in ("dataset_info.json", "dataset_dict.json"))


def _library() -> Any:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise ImportError(
            "Hugging Face datasets need the package datasets: pip install 'selectivit[datasets]'"
        ) from error
    return datasets
