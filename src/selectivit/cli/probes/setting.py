"""The model that is probed, its attention and its kept features: what the options of all kinds say."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, Namespace

from selectivit.cli.options import RunOptions, SwapOptions, add_options, option, pick_device, take
from selectivit.cli.progress import progress
from selectivit.cli.ranks import Ranks, torchrun_ranks
from selectivit.cli.swapping import load_calibration, swapped, swaps
from selectivit.data.digest import settings_digest
from selectivit.data.writing import check_writable

if TYPE_CHECKING:
    import torch

    from selectivit.eval.crop_training import FrozenTokens
    from selectivit.eval.feature_cache import FeatureCache, PhotoSet
    from selectivit.eval.fitting import Keeping

UNFINISHED = "unfinished"


@dataclass(frozen=True)
class ProbeOptions:
    """What the probe sees."""

    block: str | int = option(
        -1, "BLOCKS", "block whose tokens are seen: -1 the last; 11, or 8,9,10,11 side by side; last4 the last four"
    )
    tokens: str = option("patch", "WHICH", "cls, patch, or cls+patch side by side")
    norm: bool = option(True, "BOOL", "pass the tokens of every block through the model's final norm")
    size: int | None = option(None, "PX", "the photo's shorter side, or the side of its middle crop")
    num_cores: int | None = option(None, "N", "cores that a core-periphery model (VECA) is to use; default: all")
    batch_size: int = option(8, "N", "photos that pass the model at once; fewer need less memory")
    cache: str | None = option(None, "FOLDER", "where features are kept; default: features in --out")
    workers: int = option(0, "N", "processes that read photos beside this one")


def add_common(parser: ArgumentParser, **defaults: Any) -> None:
    """Declare the options that all kinds have.

    Args:
        parser: the kind's parser.
        defaults: other defaults of `ProbeOptions`.
    """
    add_options(parser, RunOptions)
    add_options(parser, ProbeOptions, **defaults)
    add_options(parser, SwapOptions, normalizer="softmax")


@dataclass(frozen=True)
class Setting:
    """A model that is ready to be probed.

    Args:
        where: model's name, folder, device, seed.
        what: blocks and tokens.
        cache: its features.
        device: where it is.
        out: the folder of results.
        attention: in words.
        ranks: the processes; only the first trains and writes.
    """

    where: RunOptions
    what: ProbeOptions
    cache: FeatureCache
    device: torch.device
    out: Path
    attention: str
    ranks: Ranks

    def shared_cache(self) -> FeatureCache:
        """The cache when each process computes its share; all must use it."""
        return replace(self.cache, share=self.ranks.share, wait=lambda: self.ranks.gather(None))

    @property
    def num_blocks(self) -> int:
        """How many blocks the model has."""
        from selectivit.features import num_blocks

        return num_blocks(self.cache.model)

    def front(self, layers: Sequence[int]) -> FrozenTokens:
        """The model as the front of a head that is trained on crops."""
        from selectivit.eval.crop_training import FrozenTokens

        return FrozenTokens(self.cache.model, tuple(layers), self.what.tokens, self.what.norm, self.what.num_cores)

    def keeping(self, settings: dict[str, Any], every: int) -> Keeping:
        """Where an unfinished training of these settings is kept."""
        from selectivit.eval.fitting import Keeping

        digest = settings_digest(settings)
        return Keeping(self.out / UNFINISHED / f"{digest[:20]}.pt", digest, every)

    def progress(self, title: str, total: int) -> contextlib.AbstractContextManager[Callable[[str | None], None]]:
        """A progress bar of the first process."""
        return progress(title, total, shown=self.ranks.rank == 0)


def parse_blocks(text: str | int, count: int) -> list[int]:
    """Read the option --block.

    Args:
        text: a number, numbers with commas between, last4, or all.
        count: how many blocks the model has.

    Returns:
        Their numbers from 0.

    Raises:
        ValueError: anything else, or a block that the model does not have.

    Example:
        >>> parse_blocks(-1, 12), parse_blocks("last2", 12), parse_blocks("0,5", 12)
        ([11], [10, 11], [0, 5])
    """
    text = str(text).strip()
    if text == "all":
        return list(range(count))
    last = re.fullmatch(r"last(\d+)", text)
    if last:
        blocks = list(range(-int(last[1]), 0))
    else:
        try:
            blocks = [int(part) for part in text.removesuffix(",").split(",")]
        except ValueError:
            raise ValueError(f"expected --block -1, numbers such as 0,5,11, last4 or all, got {text!r}") from None
    bad = [block for block in blocks if not -count <= block < count]
    if bad or not blocks:
        raise ValueError(f"expected --block of 0 to {count - 1} (or -{count} to -1), got {text!r}")
    return [block % count for block in blocks]


@contextlib.contextmanager
def opened(options: Namespace) -> Iterator[Setting]:
    """Load the model, swap its attention if asked to, and join the other processes.

    Args:
        options: of a kind.

    Returns:
        A context manager that yields the setting.

    Raises:
        ValueError: an unknown model, a swap that does not fit, numbers that are too small.
        WriteError: the folder cannot be written to.
    """
    where, what, swap = take(RunOptions, options), take(ProbeOptions, options), take(SwapOptions, options)
    if what.batch_size < 1 or what.workers < 0 or (what.size is not None and what.size < 1):
        raise ValueError(
            f"expected --batch-size and --size of 1 or more and --workers of 0 or more, got {what.batch_size}, "
            f"{what.size} and {what.workers}"
        )
    missing = [name for name in ("torchmetrics", "torchvision") if find_spec(name) is None]
    if missing:
        raise ImportError(f"probes need {' and '.join(missing)}, missing here: pip install 'selectivit[probe]'")
    out = Path(where.out)
    with torchrun_ranks() as ranks:
        check_writable(out)
        from selectivit.data.digest import tensors_digest
        from selectivit.eval.feature_cache import FeatureCache
        from selectivit.eval.identity import model_identity, own_attention
        from selectivit.models.weights import load_model

        device = pick_device(where.device, ranks.local_rank)
        model = load_model(where.model, device=str(device)).eval()
        calibration = load_calibration(swap)
        attention: Any = None
        if swaps(swap):
            factors = None if calibration is None else tensors_digest(calibration.factors)
            attention = {**asdict(swap), "calibration": factors}
            attention |= {"seed": where.seed} if swap.normalizer == "random_mask" else {}
        cache = FeatureCache(
            Path(what.cache) if what.cache else out / "features",
            model,
            model_identity(model, where.model, attention),
            what.norm,
            what.num_cores,
            what.batch_size,
            what.workers,
            lambda title, total: progress(title, total, shown=ranks.rank == 0),
        )
        with swapped(model, swap, where.seed, calibration) if swaps(swap) else nullcontext():
            yield Setting(where, what, cache, device, out, _in_words(swap, own_attention(model)), ranks)


def _in_words(swap: SwapOptions, own: str | float) -> str:
    if not swaps(swap):
        return own if isinstance(own, str) else f"entmax-{own:g}"
    alpha = f"-{swap.alpha:g}" if swap.normalizer == "entmax" else ""
    scores = "" if swap.scores == "qk" else f" {swap.scores}"
    layers = {"all": "all layers"}.get(str(swap.layers), f"layers {swap.layers}")
    return f"{swap.normalizer}{alpha}{scores}, {layers}" + ("" if swap.calibration is None else ", calibrated")


def photo_set(paths: Sequence[Path], root: Path, name: str) -> PhotoSet:
    """The photos of a split for the cache.

    Args:
        paths: the files.
        root: the data set's folder.
        name: of the split, for progress.

    Returns:
        The photos, known by their files' names, sizes and times.
    """
    from selectivit.data.digest import stat_digest
    from selectivit.data.photos import PhotoFiles
    from selectivit.eval.feature_cache import PhotoSet

    return PhotoSet(PhotoFiles([str(path) for path in paths]), stat_digest(paths, root), name)
