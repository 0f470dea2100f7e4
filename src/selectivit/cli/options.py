"""Options that mean the same in every command."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

if TYPE_CHECKING:
    import torch
    from jsonargparse import ArgumentParser, Namespace

Options = TypeVar("Options")


def option(default: Any, unit: str, text: str) -> Any:
    """Declare a field of a dataclass of options.

    Args:
        default: its default.
        unit: what its value is, in one word for --help, such as PX.
        text: what it means.

    Returns:
        The field.
    """
    return field(default=default, metadata={"metavar": unit, "help": text})


@dataclass(frozen=True)
class RunOptions:
    """Where a command computes, and where it writes; these mean the same in every command."""

    model: str = option("dinov2-small", "NAME", "pretrained model, or a local folder; see `selectivit models`")
    out: str = option("out", "FOLDER", "folder for the results, made if it is not there")
    device: str = option(
        "auto", "DEVICE", "cpu, cuda, cuda:1 or mps; auto is a CUDA card if there is one, else the CPU"
    )
    seed: int = option(0, "N", "seed of all random numbers")


@dataclass(frozen=True)
class SwapOptions:
    """The attention that takes the place of softmax."""

    normalizer: str = option("entmax", "NAME", "how scores become weights: softmax, entmax, sparsemax or random_mask")
    alpha: float = option(1.5, "ALPHA", "entmax's alpha, 1 or more: 1 is softmax, 2 is sparsemax; larger is sparser")
    scores: str = option(
        "qk", "SOURCE", "what is compared: qk, qq, kk, vv, a sum such as qq+kk, or v (each token keeps its own value)"
    )
    layers: str | int = option(
        "all", "LAYERS", "all; -1 the last, -4 the last four; 0,5,11 just these, counted from 0 (11, is 11 alone)"
    )
    calibration: str | None = option(
        None, "FOLDER", "factors on the scores per layer and head, as `compare --save-calibration FOLDER` writes them"
    )


def add_options(parser: ArgumentParser, kind: type[Any], **defaults: Any) -> None:
    """Declare a group of options.

    Args:
        parser: of a command.
        kind: a dataclass whose fields are made by `option`; its docstring's first line heads the group in --help.
        defaults: other defaults than the dataclass's.
    """
    group = parser.add_argument_group((kind.__doc__ or "").split("\n")[0].rstrip("."))
    types = get_type_hints(kind)
    for f in fields(kind):
        name = "--" + f.name.replace("_", "-")
        group.add_argument(name, type=types[f.name], default=defaults.get(f.name, f.default), **f.metadata)


def take(kind: type[Options], options: Namespace) -> Options:
    """Pick one group of options out of all that were parsed.

    Args:
        kind: a dataclass of options.
        options: all options of a command.

    Returns:
        The group.
    """
    names = get_type_hints(kind)
    return kind(**{name: options[name] for name in names})


def parse_layers(text: str | int) -> int | list[int] | None:
    """Read the option --layers.

    Args:
        text: "all", a number, or numbers with commas between.

    Returns:
        What `swap_attention` takes: None for all, -n for the last n, a list for just these.

    Raises:
        ValueError: anything else.

    Example:
        >>> parse_layers("all"), parse_layers("-4"), parse_layers("0,5,11")
        (None, -4, [0, 5, 11])
    """
    if isinstance(text, int):
        return text
    if text.strip() == "all":
        return None
    try:
        numbers = [int(part) for part in text.removesuffix(",").split(",")]
    except ValueError:
        raise ValueError(f"expected --layers all, one number, or numbers such as 0,5,11, got {text!r}") from None
    return numbers if "," in text else numbers[0]


def parse_numbers(name: str, text: str) -> list[int]:
    """Read an option of whole numbers.

    Args:
        name: the option's, with an example, such as "--budgets 8,16,64".
        text: numbers with commas between.

    Returns:
        The numbers, sorted, each once.

    Raises:
        ValueError: anything else.

    Example:
        >>> parse_numbers("--budgets 8,16,64", "4,1,4")
        [1, 4]
    """
    try:
        return sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise ValueError(f"expected numbers with commas between, such as {name}, got {text!r}") from None


def parse_patch(text: str) -> tuple[int, int]:
    """Read the option --patch.

    Args:
        text: row and column of a patch with a comma between, counted from 0 at the upper left.

    Returns:
        Row and column.

    Raises:
        ValueError: anything else.

    Example:
        >>> parse_patch("12,20")
        (12, 20)
    """
    try:
        row, column = (int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"expected --patch ROW,COLUMN such as 12,20, got {text!r}") from None
    return row, column


def pick_device(name: str, local_rank: int = 0) -> torch.device:
    """Turn the option --device into a device that is there.

    Args:
        name: auto, cpu, cuda, cuda:1, mps.
        local_rank: the process's number on this machine; "auto" and "cuda" give each process its own card.

    Returns:
        The device.

    Raises:
        ValueError: no such device, or it is not there.

    Example:
        >>> pick_device("cpu")
        device(type='cpu')
    """
    import torch

    cards = torch.cuda.device_count()
    if name == "auto":
        name = "cuda" if cards else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"expected --device auto, cpu, cuda, cuda:1 or mps, got {name!r}") from None
    if device.type == "cuda":
        index = local_rank if device.index is None else device.index
        if index >= cards:
            raise ValueError(
                f"expected one of {cards} CUDA devices, got --device {name}; --device cpu works everywhere"
            )
        return torch.device("cuda", index)
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError("expected a machine with Apple's mps for --device mps; --device cpu works everywhere")
    return device
