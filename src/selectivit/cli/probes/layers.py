"""Any probe block by block: one table and one plot.

The features of all blocks come from one pass. The plot holds every series that was made into the same folder on the
same data: run it with other --tokens, another attention or another model, and compare.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from selectivit.cli.probes import depth, knn, linear, segmentation
from selectivit.cli.probes.making import Probe, make_one, say_before
from selectivit.cli.probes.results import Results
from selectivit.cli.probes.setting import Setting, opened, parse_blocks
from selectivit.data.writing import write_atomic

HELP = "any probe block by block: one table and one plot"
KINDS = {"knn": knn, "linear": linear, "segmentation": segmentation, "depth": depth}


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the probes, each with the options that it has alone.

    Args:
        parser: the kind's parser.
    """
    kinds = parser.add_subcommands(dest="probe", metavar="PROBE", title="probes")
    for name, module in KINDS.items():
        probe = ArgumentParser(description=module.__doc__)
        probe.add_argument("--config", action="config", help="file with options of this probe, YAML or JSON")
        kinds.add_subcommand(name, probe, help=module.HELP)
        module.add_arguments(probe)
        probe.set_defaults(block="all")


def run(options: Namespace) -> int:
    """Probe every block.

    Args:
        options: the parsed options.

    Returns:
        The exit status: 0 all done, 1 some photos were skipped.
    """
    name = options.probe
    with opened(options[name]) as setting:
        blocks = parse_blocks(setting.what.block, setting.num_blocks)
        probe: Probe = KINDS[name].prepare(setting, options[name])
        probe.warm(setting.shared_cache(), blocks)
        if setting.ranks.rank:
            return 0
        say_before(setting, probe, f"each of {', '.join(map(str, blocks))}")
        title, headline, higher = probe.headline
        points, skipped = [], {}
        print(f"block   {title}")
        for block in blocks:
            made, kept = make_one(setting, probe, [block])
            points.append({"block": block, "value": headline(made["result"]), "result": made["result"]})
            skipped |= {entry["source"]: entry["reason"] for entry in made.get("skipped", [])}
            print(f"{block:5}   {points[-1]['value']:.4f}{'   (kept)' if kept else ''}", flush=True)
        best = (max if higher else min)(points, key=lambda point: point["value"])
        print(f"best: block {best['block']}, {title} {best['value']:.4f}")
        files = _write(setting, probe, points, skipped)
    for source, reason in skipped.items():
        print(f"skipped: {source}: {reason}", file=sys.stderr)
    print(*files, sep="\n")
    return 1 if skipped else 0


def _write(setting: Setting, probe: Probe, points: list[dict[str, Any]], skipped: dict[str, str]) -> list[Path]:
    """Add the series to the JSON of its kind, and draw all of the same data."""
    from selectivit.vis.layers import layer_picture

    title, _, higher = probe.headline
    results = Results(setting.out / f"layers.{probe.kind}.json")
    what = setting.what
    label = f"{Path(setting.where.model).name}, {what.tokens}, {setting.attention}"
    settings = {"model": setting.cache.identity, "tokens": what.tokens, "norm": what.norm, **probe.decides}
    settings |= {"num_cores": what.num_cores, "seed": setting.where.seed}
    earlier = results.get(settings)
    known = {} if earlier is None else {point["block"]: point for point in earlier["result"]["points"]}
    merged = [point for _, point in sorted((known | {p["block"]: p for p in points}).items())]
    told = [{"source": source, "reason": reason} for source, reason in skipped.items()]
    run = {"protocol": probe.protocol, "result": {"label": label, "metric": title, "points": merged}, "skipped": told}
    results.put(settings, run)
    same = [r for r in results.runs() if all(r["settings"].get(k) == v for k, v in _comparable(probe.decides).items())]
    series: dict[str, list[tuple[int, float]]] = {}
    for other in same:
        name = other["result"]["label"]
        while name in series:
            name += "′"
        series[name] = [(point["block"], point["value"]) for point in other["result"]["points"]]
    picture = setting.out / f"layers.{probe.kind}.png"
    write_atomic(picture, layer_picture(series, title, higher, probe.describe[0]))
    return [results.path, picture]


def _comparable(decides: dict[str, Any]) -> dict[str, Any]:
    """What must be equal for two series to stand in one plot: the data and the protocol."""
    import json

    return json.loads(json.dumps({name: decides[name] for name in ("data", "protocol") if name in decides}))
