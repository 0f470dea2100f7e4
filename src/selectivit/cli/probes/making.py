"""A probe on one data set: made of some blocks or kept from an earlier run, and told."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jsonargparse import Namespace

from selectivit.cli.probes.results import Results
from selectivit.cli.probes.setting import UNFINISHED, Setting, opened, parse_blocks

if TYPE_CHECKING:
    from selectivit.eval.feature_cache import FeatureCache


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
            probe.warm(setting.shared_cache(), layers)
        if setting.ranks.rank:
            return 0  # the first process does the rest
        say_before(setting, probe, ", ".join(map(str, layers)))
        run, kept = make_one(setting, probe, layers)
        tell(run["result"])
        print(f"{setting.out / f'{probe.kind}.json'}{' (kept from an earlier run)' if kept else ''}")
        return say_skipped(run)
