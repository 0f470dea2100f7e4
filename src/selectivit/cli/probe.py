"""Judge frozen features by a simple head: classes of photos, segmentation, depth; per block; or by Point-in-Box.

Features are computed once and kept in --cache; a head of another seed, rate or kind of tokens takes them from there.
Features of another model, attention, size or data set are never taken. Results of earlier runs with the same settings
are kept, and a stopped run goes on where it was.
"""

from __future__ import annotations

from jsonargparse import ArgumentParser, Namespace

from selectivit.cli import point_in_box
from selectivit.cli.probes import depth, knn, layers, linear, report, segmentation

HELP = "judge frozen features by k-NN, linear classifiers, segmentation and depth, from any block; Point-in-Box"

KINDS = {
    "knn": knn,
    "linear": linear,
    "segmentation": segmentation,
    "depth": depth,
    "layers": layers,
    "point-in-box": point_in_box,
    "report": report,
}
"""Name -> module with HELP, add_arguments(parser) and run(options) -> exit status."""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the command's kinds, each with options of its own.

    Args:
        parser: the command's parser.
    """
    kinds = parser.add_subcommands(dest="kind", metavar="KIND", title="kinds")
    for name, module in KINDS.items():
        kind = ArgumentParser(description=module.__doc__)
        kind.add_argument("--config", action="config", help="file with options of this kind, YAML or JSON")
        kinds.add_subcommand(name, kind, help=module.HELP)
        module.add_arguments(kind)


def run(options: Namespace) -> int:
    """Probe.

    Args:
        options: the parsed options.

    Returns:
        The exit status: 0 all done, 1 something was skipped.

    Raises:
        ValueError: data, a model or settings that do not fit; the text says which.
        WriteError: the folder cannot be written to.
    """
    return KINDS[options.kind].run(options[options.kind])
