"""What all kinds of probes share: the model, its attention, its kept features, and how a result is told."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, Namespace

from selectivit.cli.options import RunOptions, SwapOptions, add_options, option, pick_device, take
from selectivit.cli.probes.results import Results, settings_digest
from selectivit.cli.progress import progress
from selectivit.cli.ranks import Ranks, torchrun_ranks
from selectivit.cli.swapping import load_calibration, swapped, swaps
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

    def warm(self, probe: Probe, layers: Sequence[int]) -> None:
        """Compute the features of some blocks in one pass, each process its share; all must call it."""
        shared = replace(self.cache, share=self.ranks.share, wait=lambda: self.ranks.gather(None))
        probe.warm(shared, layers)

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


@dataclass(frozen=True)
class Probe:
    """One kind of probe on one data set, ready to be made of any blocks.

    Args:
        kind: its name, and that of its JSON.
        protocol: in words, with its source.
        describe: lines that say what is done on what.
        decides: all that decides a result beside model, blocks and tokens.
        warm: computes the features of some blocks in one pass.
        make: from blocks, and all that decides the result, to the result and what was skipped and why.
        headline: name of the main number, from a result to it, and whether more is better.
    """

    kind: str
    protocol: dict[str, str]
    describe: list[str]
    decides: dict[str, Any]
    warm: Callable[[FeatureCache, Sequence[int]], object]
    make: Callable[[Sequence[int], dict[str, Any]], tuple[dict[str, Any], dict[str, str]]]
    headline: tuple[str, Callable[[dict[str, Any]], float], bool]
    notes: tuple[str, ...] = field(default=())


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
        from selectivit.eval.identity import model_identity
        from selectivit.models.weights import load_model

        device = pick_device(where.device, ranks.local_rank)
        model = load_model(where.model, device=str(device)).eval()
        calibration = load_calibration(swap)
        attention: Any = "softmax"
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
            yield Setting(where, what, cache, device, out, _in_words(swap), ranks)


def _in_words(swap: SwapOptions) -> str:
    if not swaps(swap):
        return "softmax"
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


def make_one(setting: Setting, probe: Probe, layers: Sequence[int]) -> tuple[dict[str, Any], bool]:
    """The probe of some blocks, made or kept, and written to its JSON.

    Args:
        setting: the model.
        probe: the probe.
        layers: blocks, side by side.

    Returns:
        The run, and whether it is an earlier one.
    """
    what = setting.what
    settings = {
        "model": setting.cache.identity,
        "tokens": what.tokens,
        "blocks": list(layers),
        "norm": what.norm,
        "num_cores": what.num_cores,
        **probe.decides,
        "seed": setting.where.seed,
    }

    def make() -> dict[str, Any]:
        result, skipped = probe.make(layers, settings)
        told = [{"source": source, "reason": reason} for source, reason in skipped.items()]
        return {"protocol": probe.protocol, "notes": list(probe.notes), "result": result, "skipped": told}

    found = Results(setting.out / f"{probe.kind}.json").get_or_make(settings, make)
    with contextlib.suppress(OSError):
        (setting.out / UNFINISHED).rmdir()  # where nothing else is unfinished
    return found


def say_before(setting: Setting, probe: Probe, blocks: str) -> None:
    """Print what is done, on what, and by whose protocol."""
    what = setting.what
    print(f"{probe.kind}: {setting.where.model}, {setting.attention}, block {blocks}, {what.tokens} tokens")
    for line in probe.describe:
        print(line)
    for name, text in probe.protocol.items():
        print(f"{'protocol' if name == 'name' else name}: {text}")
    for note in probe.notes:
        print(f"note: {note}", file=sys.stderr)


def say_skipped(run: dict[str, Any]) -> int:
    """Name what was skipped on stderr.

    Returns:
        The exit status: 1 if something was.
    """
    for entry in run.get("skipped", []):
        print(f"skipped: {entry['source']}: {entry['reason']}", file=sys.stderr)
    return 1 if run.get("skipped") else 0


def run_probe(options: Namespace, prepare: Callable[[Setting, Namespace], Probe], tell: Callable[[dict], None]) -> int:
    """Make one probe and tell its result.

    Args:
        options: of the kind.
        prepare: opens the data.
        tell: prints a result.

    Returns:
        The exit status.
    """
    with opened(options) as setting:
        layers = parse_blocks(setting.what.block, setting.num_blocks)
        probe = prepare(setting, options)
        if setting.ranks.size > 1:
            setting.warm(probe, layers)
        if setting.ranks.rank:
            return 0  # the first process does the rest
        say_before(setting, probe, ", ".join(map(str, layers)))
        run, kept = make_one(setting, probe, layers)
        tell(run["result"])
        print(f"{setting.out / f'{probe.kind}.json'}{' (kept from an earlier run)' if kept else ''}")
        return say_skipped(run)
