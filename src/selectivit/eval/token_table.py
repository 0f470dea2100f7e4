"""Tokens from the disk: of one block, or of several side by side, CLS and patches as a probe wants them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

TOKENS = ("cls", "patch", "cls+patch")


def read_shard(path: Path, digest: str) -> dict[str, Any] | None:
    """Look into a file of tokens.

    Args:
        path: the file.
        digest: of the settings that it must have been made with.

    Returns:
        Its header's metadata; None where it is not there, damaged, or of other settings.
    """
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
    except (SafetensorError, OSError):
        return None
    return metadata if metadata.get("settings") == digest else None


@dataclass(frozen=True)
class BlockTokens:
    """The tokens that left one block, of all photos.

    Args:
        patch: a tensor (rows, C) float16 a file, mapped into memory and read as they are used.
        cls: (photos, C) float16, or None.
        grids: (photos, 2), rows and columns; 0 where a photo could not be read.
        problems: photo -> why it could not be read.
    """

    patch: tuple[Tensor, ...]
    cls: Tensor | None
    grids: Tensor
    problems: dict[str, str]

    @classmethod
    def open(cls, paths: Sequence[Path], digest: str) -> BlockTokens:
        """Open the files of one block.

        Args:
            paths: in their order.
            digest: of the settings.

        Returns:
            The tokens.

        Raises:
            ValueError: a file is not there or of other settings.
        """
        from safetensors.torch import load_file

        patch, heads, grids, problems = [], [], [], {}
        for path in paths:
            metadata = read_shard(path, digest)
            if metadata is None:
                raise ValueError(f"{path} is missing or of other settings: run the command again")
            tensors = load_file(path)
            problems |= json.loads(metadata["problems"])
            grids.append(tensors["grid"])
            if "patch" in tensors:
                patch.append(tensors["patch"])
            heads.append(tensors.get("cls"))
        width = next((t.shape[1] for t in patch), 0)
        has_cls = any(head is not None for head in heads)
        blank = [
            torch.zeros(len(grid), width, dtype=torch.float16) if head is None else head
            for grid, head in zip(grids, heads, strict=True)
        ]
        return cls(tuple(patch), torch.cat(blank) if has_cls else None, torch.cat(grids), problems)

    @property
    def readable(self) -> list[bool]:
        """Which photos could be read."""
        return (self.grids[:, 0] > 0).tolist()


class TokenTable:
    """What a probe sees: of each patch its own token, CLS, or both; of several blocks one after the other.

    Args:
        blocks: of the same photos.
        tokens: "cls", "patch" or "cls+patch".

    Raises:
        ValueError: other tokens, or CLS of a model that has none.
    """

    def __init__(self, blocks: Sequence[BlockTokens], tokens: str):
        if tokens not in TOKENS:
            raise ValueError(f"expected --tokens {', '.join(TOKENS)}, got {tokens!r}")
        if "cls" in tokens and blocks[0].cls is None:
            raise ValueError(f"the model has no class token: expected --tokens patch, got {tokens}")
        self.blocks, self.tokens, self.grids = list(blocks), tokens, blocks[0].grids
        self.starts = torch.cat([torch.zeros(1, dtype=torch.long), self.grids.prod(1).cumsum(0)])  # (photos + 1)
        lengths = torch.tensor([len(t) for t in blocks[0].patch])
        self._ends = lengths.cumsum(0)

    @property
    def num_rows(self) -> int:
        """Patches of all photos."""
        return int(self.starts[-1])

    @property
    def width(self) -> int:
        """Numbers a patch."""
        return sum(b.patch[0].shape[1] for b in self.blocks) * (2 if self.tokens == "cls+patch" else 1)

    def rows(self, rows: Tensor) -> Tensor:
        """Some patches.

        Args:
            rows: their numbers, counted through all photos.

        Returns:
            (len(rows), width) float32: of each block CLS, then the patch.
        """
        photos = torch.bucketize(rows, self.starts[1:], right=True)
        parts = []
        for block in self.blocks:
            if block.cls is not None and self.tokens != "patch":
                parts.append(block.cls[photos].float())
            if self.tokens != "cls":
                parts.append(self._patches(block, rows))
        return torch.cat(parts, 1)

    def _patches(self, block: BlockTokens, rows: Tensor) -> Tensor:
        found = torch.empty(len(rows), block.patch[0].shape[1])
        files = torch.bucketize(rows, self._ends, right=True)
        for file in files.unique().tolist():
            here = files == file
            start = int(self._ends[file - 1]) if file else 0
            found[here] = block.patch[file][rows[here] - start].float()
        return found

    def photo(self, index: int) -> Tensor:
        """All of one photo.

        Args:
            index: its place.

        Returns:
            (width, h, w) float32.
        """
        rows = torch.arange(int(self.starts[index]), int(self.starts[index + 1]))
        height, width = self.grids[index].tolist()
        return self.rows(rows).t().unflatten(1, (height, width))
