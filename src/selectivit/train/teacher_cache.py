"""The teacher's tokens of crops that come again, kept on the disk: a teacher is most of a step, and says the same."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from selectivit.data.training_images import Batch
from selectivit.data.writing import write_error, write_json
from selectivit.train.pair import Pair
from selectivit.train.tokens import DenseTokens

CHUNK, CHUNK_CPU = 32, 8
"""Crops that the teacher sees at once: always as many, since the rounding of a product follows its shape."""
FLUSH_EVERY = 64
"""Batches between two times that the files are made to outlast a loss of power."""
CHECK_BYTES = 8


class TeacherCache:
    """Gives the teacher's tokens of a batch, from the disk where they were computed before.

    The tokens are in half precision, also where they are computed, so that it makes no difference which of the two
    happens. An entry counts only for the crop that it was made from, known again by a digest of its pixels. Runs and
    processes may share a folder.

    Args:
        folder: a sub-folder of it, named by a digest of `identity`, is made and used.
        identity: what tokens and slots follow from: teacher, precision, photos, crops of each, seed.
        pair: with the teacher.

    Raises:
        WriteError: the folder cannot be written.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any], pair: Pair):
        digest = blake2b(repr(sorted(identity.items())).encode(), digest_size=8).hexdigest()
        self.folder, self.pair = folder / digest, pair
        self._entries: dict[int, _Entries] = {}
        self._calls = 0
        write_json(self.folder / "identity.json", dict(identity))

    def teach(self, batch: Batch) -> DenseTokens:
        """The teacher's tokens.

        Args:
            batch: crops of one size, with their slots.

        Returns:
            As `Pair.teach`, rounded to half precision, on the images' device.

        Raises:
            WriteError: the files cannot be written or read; a full disk.
        """
        images, size = batch.images, batch.images.shape[-1]
        side = round(size / self.pair.expects["teacher"].patch_size)
        checks = [blake2b(crop.numpy().data, digest_size=CHECK_BYTES).digest() for crop in images.cpu()]
        try:
            if size not in self._entries:
                self._entries[size] = _Entries(self.folder / str(size), (1 + side**2, self.pair.width))
            entries = self._entries[size]
            missing = [i for i, slot in enumerate(batch.slots) if not entries.has(slot, checks[i])]
            if missing:
                for i, tokens in zip(missing, self._computed(images[missing]), strict=True):
                    entries.write(batch.slots[i], checks[i], tokens)
            tokens = entries.read(batch.slots)
            self._calls += 1
            if self._calls % FLUSH_EVERY == 0:
                self._flush()
        except OSError as error:
            raise write_error(self.folder, error) from error
        tokens = tokens.to(images.device).float()  # (B, 1 + N, C)
        return DenseTokens(tokens[:, 0], tokens[:, 1:], (side, side))

    def close(self) -> None:
        """Keep what was computed for other runs.

        Raises:
            WriteError: the disk is full.
        """
        try:
            self._flush()
            for entries in self._entries.values():
                entries.close()
        except OSError as error:
            raise write_error(self.folder, error) from error
        self._entries = {}

    def _computed(self, images: Tensor) -> Tensor:
        """Half-precision tokens, (B, 1 + N, C), global token first; in chunks of one length."""
        chunk = CHUNK_CPU if images.device.type == "cpu" else CHUNK
        filled = torch.cat([images, images[-1:].expand(-len(images) % chunk, -1, -1, -1)])
        parts = [self.pair.teach(part) for part in filled.split(chunk)]
        tokens = torch.cat([torch.cat([part.global_token[:, None], part.patch_tokens], 1) for part in parts])
        return tokens[: len(images)].half().cpu()

    def _flush(self) -> None:
        for entries in self._entries.values():
            entries.flush()


class _Entries:
    """Two files: tokens slot by slot, with holes, and the digest of the crop of each slot that is filled."""

    def __init__(self, path: Path, shape: tuple[int, int]):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.shape, self.bytes = shape, 2 * shape[0] * shape[1]
        self.tokens = os.open(path.with_suffix(".tokens"), os.O_RDWR | os.O_CREAT, 0o644)
        self.marks = os.open(path.with_suffix(".checks"), os.O_RDWR | os.O_CREAT, 0o644)
        self.checks: dict[int, bytes] = {}
        self.unmarked: dict[int, bytes] = {}  # their tokens may not have reached the disk

    def has(self, slot: int, check: bytes) -> bool:
        if self.checks.get(slot) != check:  # another run may have been here since
            self.checks[slot] = os.pread(self.marks, CHECK_BYTES, slot * CHECK_BYTES)
        return self.checks[slot] == check

    def write(self, slot: int, check: bytes, tokens: Tensor) -> None:
        if any(self.checks.get(slot, b"")):
            os.pwrite(self.marks, bytes(CHECK_BYTES), slot * CHECK_BYTES)  # an edited photo: neither old nor new yet
        _write_all(self.tokens, tokens.contiguous().numpy().tobytes(), slot * self.bytes)
        self.checks[slot] = self.unmarked[slot] = check

    def read(self, slots: Sequence[int]) -> Tensor:
        rows = [np.frombuffer(os.pread(self.tokens, self.bytes, slot * self.bytes), np.float16) for slot in slots]
        return torch.from_numpy(np.stack(rows)).view(len(slots), *self.shape)

    def flush(self) -> None:
        """Tokens first: a mark without its tokens would be believed."""
        os.fsync(self.tokens)
        for slot, check in self.unmarked.items():
            _write_all(self.marks, check, slot * CHECK_BYTES)
        self.unmarked = {}

    def close(self) -> None:
        for file in (self.tokens, self.marks):
            with contextlib.suppress(OSError):
                os.close(file)


def _write_all(file: int, data: bytes, place: int) -> None:
    if os.pwrite(file, data, place) != len(data):  # the last bytes that fitted
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
