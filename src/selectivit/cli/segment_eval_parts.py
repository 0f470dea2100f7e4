"""What has been counted so far of an evaluation, kept in files so that a stopped run goes on where it was."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selectivit.cli.ranks import Ranks
from selectivit.data.writing import write_atomic

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Part:
    """Pictures that were counted, and their matrix; a change makes a new one, so that Ctrl-C never falls in between.

    Args:
        confusion: (K, K) int64, rows are labels; the sum over the pictures.
        done: the pictures' numbers.
        void: those of them whose mask holds nothing but void.
    """

    confusion: Tensor
    done: tuple[int, ...] = ()
    void: tuple[int, ...] = ()

    def plus(self, number: int, confusion: Tensor) -> Part:
        """With one picture more."""
        void = self.void if confusion.any() else (*self.void, number)
        return Part(self.confusion + confusion, (*self.done, number), void)


def part_file(folder: Path, rank: int) -> Path:
    """The file of one process."""
    return folder / f"{rank}.safetensors"


def save_part(path: Path, part: Part, settings: dict[str, Any]) -> None:
    """Write a part so that it is there whole or not at all.

    Args:
        path: the file.
        part: what was counted.
        settings: all that it depends on.

    Raises:
        WriteError: no space, no permission.
    """
    import torch
    from safetensors.torch import save

    numbers = {name: torch.tensor(getattr(part, name), dtype=torch.long) for name in ("done", "void")}
    write_atomic(path, save({"confusion": part.confusion, **numbers}, {"settings": json.dumps(settings)}))


def read_part(path: Path, settings: dict[str, Any]) -> Part:
    """Read a part that an earlier run left.

    Args:
        path: the file.
        settings: of this run.

    Returns:
        The part.

    Raises:
        ValueError: a damaged file, or one that was made with other settings.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            theirs = json.loads((file.metadata() or {})["settings"])
            tensors = {name: file.get_tensor(name) for name in ("confusion", "done", "void")}
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({error}): remove the folder {path.parent} to start anew") from None
    ours = json.loads(json.dumps(settings))  # as it was read: tuples are lists
    other = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
    if other:
        told = "; ".join(f"{key}: {_short(theirs.get(key))} there, {_short(ours.get(key))} here" for key in other)
        raise ValueError(
            f"{path.parent} holds an evaluation with other settings ({told}): choose another --out, or remove that "
            "folder to start anew"
        )
    return Part(tensors["confusion"], tuple(tensors["done"].tolist()), tuple(tensors["void"].tolist()))


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "…"


def resume(folder: Path, settings: dict[str, Any], classes: int, ranks: Ranks) -> tuple[Part, Part]:
    """Take up what earlier runs left, of as many processes as they had.

    Args:
        folder: with their files.
        settings: of this run.
        classes: how many there are.
        ranks: the processes of this run; each waits here for the others.

    Returns:
        The part that this process goes on with; and the whole that all have done.

    Raises:
        ValueError: damaged files, or other settings.
    """
    import torch

    nothing = Part(torch.zeros(classes, classes, dtype=torch.long))
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    mine = part_file(folder, ranks.rank)
    own = read_part(mine, settings) if mine in files else nothing
    taken = {part_file(folder, rank) for rank in range(ranks.size)}
    more = [read_part(path, settings) for path in files if path not in taken] if ranks.rank == 0 else []
    return own, together(ranks.gather(together([own, *more])))


def together(parts: list[Part]) -> Part:
    """The sum of parts.

    Args:
        parts: at least one.

    Returns:
        One part with the pictures of all.
    """
    import torch

    done, void = (tuple(sorted(n for part in parts for n in getattr(part, name))) for name in ("done", "void"))
    return Part(torch.stack([part.confusion for part in parts]).sum(0), done, void)
