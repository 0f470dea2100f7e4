"""Features of many photos, computed once and kept on disk in half precision: several blocks in one pass.

A folder holds one setting (model, attention, view, photos), a sub-folder one block, a file a few photos. Files are
written whole or not at all, so that a stopped extraction goes on at the next file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from selectivit.data.digest import settings_digest
from selectivit.data.images import ImageError
from selectivit.data.photos import PhotoSource
from selectivit.data.views import View
from selectivit.data.writing import write_atomic, write_json
from selectivit.eval.token_table import BlockTokens, read_shard
from selectivit.features import Features, block_features, num_blocks, preprocessing

SHARD = {"dense": 16, "pooled": 256}
"""Photos a file: what is lost at most when an extraction is stopped."""

Progress = Callable[[str, int], AbstractContextManager[Callable[[str | None], None]]]


@dataclass(frozen=True)
class PhotoSet:
    """The photos of one split.

    Args:
        photos: their source.
        digest: of their content, or of their names, sizes and times of change.
        name: for progress.
    """

    photos: PhotoSource
    digest: str
    name: str


@dataclass(frozen=True)
class FeatureCache:
    """A model whose features are kept.

    Args:
        root: folder of all caches.
        model: in eval mode on its device, swapped or not.
        identity: all that its features depend on beside photos, view and block; see `model_identity`.
        norm: pass the tokens of every block through the final norm.
        num_cores: budget of a VECA model.
        batch_size: photos computed at once.
        workers: processes that read photos; 0 reads them in this one.
        progress: opens a progress bar with a title and a total.
        share: this process's part of the files, where several processes ask for the same tokens at once.
        wait: for the other processes.
    """

    root: Path
    model: nn.Module
    identity: dict[str, Any]
    norm: bool = True
    num_cores: int | None = None
    batch_size: int = 8
    workers: int = 0
    progress: Progress = field(default=lambda _title, _total: nullcontext(lambda _line: None))
    share: Callable[[Sequence[int]], Sequence[int]] = field(default=lambda items: items)
    wait: Callable[[], object] = field(default=lambda: None)

    def settings(self, photos: PhotoSet, view: View, content: str) -> dict[str, Any]:
        """What the numbers depend on beside the block: where any of it differs, another folder is used."""
        data = {"photos": len(photos.photos), "sha256": photos.digest}
        whose = {**self.identity, "norm": self.norm, "num_cores": self.num_cores}
        return {"model": whose, "data": data, "view": view.record(), "content": content, "dtype": "float16"}

    def blocks(self, photos: PhotoSet, view: View, layers: Sequence[int], content: str) -> list[BlockTokens]:
        """Tokens of some blocks, computed where they are not there yet.

        Args:
            photos: whose.
            view: how each photo is seen.
            layers: which blocks, negatives from the end.
            content: "dense", all patches; or "pooled", their mean.

        Returns:
            A table for each block.

        Raises:
            ValueError: a block out of range, a crop that does not fit the patches, features too large for float16, or
                no photo that can be read.
            WriteError: the folder cannot be written.
        """
        count = num_blocks(self.model)
        bad = [layer for layer in layers if not -count <= layer < count]
        if bad or not layers:
            raise ValueError(f"expected blocks of 0 to {count - 1}, or -{count} to -1 from the end, got {list(layers)}")
        wanted = [layer % count for layer in layers]
        settings = self.settings(photos, view, content)
        digest = settings_digest(settings)
        folder = self.root / digest[:20]
        shards = range(-(-len(photos.photos) // SHARD[content]))
        todo = {n: [b for b in sorted(set(wanted)) if read_shard(_path(folder, b, n), digest) is None] for n in shards}
        mine = self.share([n for n in shards if todo[n]])
        self.wait()  # all have looked before one of them writes: else their shares would not fit together
        if mine:
            write_json(folder / "settings.json", settings)
            self._extract(photos, view, content, folder, digest, {n: todo[n] for n in mine})
        self.wait()
        tables = {block: BlockTokens.open([_path(folder, block, n) for n in shards], digest) for block in set(wanted)}
        if not any(tables[wanted[0]].readable):
            raise ValueError(
                f"none of the {len(photos.photos)} photos of {photos.name} can be read; the last: "
                f"{next(reversed(tables[wanted[0]].problems.values()), 'there are none')}"
            )
        return [tables[block] for block in wanted]

    def _extract(
        self, photos: PhotoSet, view: View, content: str, folder: Path, digest: str, todo: dict[int, list[int]]
    ) -> None:
        per, total = SHARD[content], len(photos.photos)
        spans = {n: range(n * per, min(total, (n + 1) * per)) for n in todo}
        waiting = Views(photos.photos, view, self.model, [i for span in spans.values() for i in span])
        loader = iter(DataLoader(waiting, batch_size=None, num_workers=self.workers))
        with self.progress(f"features of {photos.name}", len(waiting)) as tell:
            for n, blocks in todo.items():
                loaded = [next(loader) for _ in spans[n]]
                found = self._compute(loaded, blocks, content, tell)
                problems = {
                    photos.photos.name(i): x for i, x in zip(spans[n], loaded, strict=True) if isinstance(x, str)
                }
                for block in blocks:
                    path = _path(folder, block, n)
                    write_atomic(path, _pack([tokens.get(block) for tokens in found], problems, digest))

    def _compute(
        self, loaded: Sequence[Tensor | str], blocks: Sequence[int], content: str, tell: Callable[[str | None], None]
    ) -> list[dict[int, tuple[Tensor, Tensor | None]]]:
        """For each photo and block the patches (h, w, C) and CLS (C), in half precision; empty if it cannot be read."""
        device = next(self.model.parameters()).device
        found: list[dict[int, tuple[Tensor, Tensor | None]]] = [{} for _ in loaded]
        for x in loaded:
            if isinstance(x, str):
                tell(f"skipped: {x}")
        for places in _by_size(loaded, self.batch_size):
            images = torch.stack([x for x in (loaded[i] for i in places) if isinstance(x, Tensor)])
            with torch.inference_mode():
                per_block = block_features(
                    self.model, images.to(device), blocks, norm=self.norm, num_cores=self.num_cores
                )
            for block, tokens in zip(blocks, per_block, strict=True):
                patches, cls = _halved(tokens, content, block)
                for row, place in enumerate(places):
                    found[place][block] = (patches[row], None if cls is None else cls[row])
            for _ in places:
                tell(None)
        return found


class Views(Dataset[Tensor | str]):
    """Photos as a model takes them, by their place in a list; a text where one cannot be read."""

    def __init__(self, photos: PhotoSource, view: View, model: nn.Module, order: Sequence[int]):
        self.photos, self.view, self.order = photos, view, list(order)
        expected = preprocessing(model)
        self.expected = {"mean": expected.mean, "std": expected.std, "patch_size": expected.patch_size}
        view.check(expected.patch_size)

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, place: int) -> Tensor | str:
        """The view of one photo, or why there is none."""
        index = self.order[place]
        try:
            image = self.photos.read(index)
        except (ImageError, OSError) as error:
            return str(error)
        return self.view(image, index, **self.expected)


def _by_size(loaded: Sequence[Tensor | str], batch_size: int) -> Iterator[list[int]]:
    sizes: dict[tuple[int, ...], list[int]] = {}
    for place, x in enumerate(loaded):
        if isinstance(x, Tensor):
            sizes.setdefault(tuple(x.shape), []).append(place)
    for places in sizes.values():
        yield from (places[i : i + batch_size] for i in range(0, len(places), batch_size))


def _halved(found: Features, content: str, block: int) -> tuple[Tensor, Tensor | None]:
    patches = found.map.permute(0, 2, 3, 1).float()  # (B, h, w, C)
    if content == "pooled":
        patches = patches.mean((1, 2), keepdim=True)
    halves = [None if t is None else t.half().cpu() for t in (patches, found.cls)]
    if not all(t is None or bool(t.isfinite().all()) for t in halves):
        raise ValueError(
            f"the features of block {block} are not finite in half precision (largest: {patches.abs().max():.3g}): "
            "give --norm true"
        )
    return halves[0], halves[1]  # pyright: ignore[reportReturnType]


def _pack(tokens: Sequence[tuple[Tensor, Tensor | None] | None], problems: dict[str, str], digest: str) -> bytes:
    import safetensors.torch

    there = [pair for pair in tokens if pair is not None]
    grids = torch.tensor([(0, 0) if pair is None else tuple(pair[0].shape[:2]) for pair in tokens])
    tensors = {"grid": grids}
    if there:
        tensors["patch"] = torch.cat([patches.flatten(0, 1) for patches, _ in there]).contiguous()
    if there and there[0][1] is not None:
        empty = torch.zeros_like(there[0][1])
        tensors["cls"] = torch.stack([empty if p is None or p[1] is None else p[1] for p in tokens])
    return safetensors.torch.save(tensors, {"settings": digest, "problems": json.dumps(problems)})


def _path(folder: Path, block: int, number: int) -> Path:
    return folder / f"block-{block:02d}" / f"{number:05d}.safetensors"
