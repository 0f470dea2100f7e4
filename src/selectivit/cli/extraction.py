"""The loop over photos: read, batch by size, compute, write; one bad photo stops none of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selectivit.cli.feature_files import kept_record, save_photo
from selectivit.cli.jobs import Outcome, Photo
from selectivit.cli.memory import ADVICE, out_of_memory, within_memory
from selectivit.cli.reading import ReadyPhoto, ready_photo
from selectivit.data.digest import file_digest
from selectivit.data.writing import WriteError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from selectivit.features import Features


@dataclass(frozen=True)
class Loaded:
    """A photo that waits for others of its size.

    Args:
        photo: which one.
        digest: its `file_digest`.
        ready: its tensors.
    """

    photo: Photo
    digest: str
    ready: ReadyPhoto


@dataclass(frozen=True)
class Extraction:
    """How one job turns photos into files.

    Args:
        model: in eval mode, on its device, swapped or not.
        out: the job's folder.
        settings: all that the numbers depend on beside the photo.
        layer: the block whose tokens are taken.
        norm: pass them through the final norm.
        size: of the shorter side in pixels; None is the model's own.
        batch_size: photos computed at once.
        outcome: filled as the work goes on, so that an interruption finds it.
        tell: called with a line to print, or None, after each photo.
        num_cores: budget of a VECA model; None is its whole bank.
    """

    model: nn.Module
    out: Path
    settings: dict[str, Any]
    layer: int
    norm: bool
    size: int | None
    batch_size: int
    outcome: Outcome
    tell: Callable[[str | None], None]
    num_cores: int | None = None

    def run(self, photos: Iterable[Photo]) -> None:
        """Work through the photos.

        Args:
            photos: in the order of reading; those of one size are computed together.
        """
        try:
            for batch in batches(self._load_all(photos), self.batch_size):
                self._compute(batch)
        except WriteError as error:  # the next photo would meet the same full disk
            self.outcome.stopped = str(error)
            self.tell(f"stopped: {error}")

    def _load_all(self, photos: Iterable[Photo]) -> Iterator[Loaded]:
        from selectivit.data.images import ImageError

        for photo in photos:
            try:
                loaded = self._load(photo)
            except WriteError:
                raise
            except (ImageError, OSError) as error:
                self._skip(photo, str(error))
                continue
            except (MemoryError, RuntimeError) as error:
                if not out_of_memory(error):
                    raise
                self._skip(photo, f"{photo.path}: not enough memory to read it: {ADVICE}")
                continue
            if loaded is not None:
                yield loaded

    def _skip(self, photo: Photo, reason: str) -> None:
        self.outcome.skipped.append({"source": str(photo.path), "reason": reason})
        self.tell(f"skipped: {reason}")

    def _load(self, photo: Photo) -> Loaded | None:
        """Read a photo; None where its results are there already."""
        digest = file_digest(photo.path)
        record = kept_record(photo, self.out, self.settings, digest)
        if record is not None:
            self.outcome.done.append(record)
            self.tell(None)
            return None
        return Loaded(photo, digest, ready_photo(photo.path, self.model, self.size))

    def _compute(self, batch: Sequence[Loaded]) -> None:
        """Compute and write; photos that are too much for memory together go one by one, one too large is skipped."""
        found = within_memory(partial(self._features, batch))
        if found is None and len(batch) > 1:
            for loaded in batch:
                self._compute([loaded])
            return
        for i, loaded in enumerate(batch):
            record = None if found is None else within_memory(partial(self._save, loaded, found, i))
            if record is None:
                height, width = loaded.ready.shown.shape[:2]
                reason = f"{loaded.photo.path}: not enough memory for {height} x {width} pixels: {ADVICE}"
                self._skip(loaded.photo, reason)
            else:
                self.outcome.done.append(record)
                self.tell(None)

    def _save(self, loaded: Loaded, found: Features, i: int) -> dict[str, Any]:
        return save_photo(loaded.photo, self.out, self.settings, loaded.digest, _tensors(found, i), loaded.ready)

    def _features(self, batch: Sequence[Loaded]) -> Features:
        import torch

        from selectivit.features import features

        device = next(self.model.parameters()).device
        images = torch.stack([loaded.ready.image for loaded in batch])  # (B, 3, H, W)
        with torch.inference_mode():
            wanted = {"layer": self.layer, "norm": self.norm, "num_cores": self.num_cores}
            return features(self.model, images.to(device), **wanted)


def batches(items: Iterable[Loaded], batch_size: int, held: int = 4) -> Iterator[list[Loaded]]:
    """Group photos of equal size, whatever order they come in, holding few of them.

    Args:
        items: photos.
        batch_size: the most photos in a group.
        held: how many full batches' worth of photos may wait for others of their size.

    Returns:
        An iterator over groups, each of photos of one size.
    """
    waiting: dict[tuple[int, ...], list[Loaded]] = {}
    for item in items:
        waiting.setdefault(tuple(item.ready.image.shape), []).append(item)
        largest = max(waiting, key=lambda shape: len(waiting[shape]))
        if len(waiting[largest]) == batch_size or sum(map(len, waiting.values())) >= held * batch_size:
            yield waiting.pop(largest)
    yield from waiting.values()


def _tensors(found: Features, i: int) -> dict[str, Tensor]:
    tensors = {"map": found.map[i], "cls": found.cls, "registers": found.registers, "cores": found.cores}
    for name in ("cls", "registers", "cores"):
        whole = tensors.pop(name)
        if whole is not None and whole.numel():
            tensors[name] = whole[i].clone()  # of a core-periphery model cls is its first core
    return {name: tensor.float().cpu() for name, tensor in tensors.items()}
