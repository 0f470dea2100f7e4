"""List the pretrained models that have a short name, and how to name any other."""

from __future__ import annotations

import json
from dataclasses import asdict

from jsonargparse import ArgumentParser, Namespace

HELP = "list the pretrained models, and how to name others"


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the command's options.

    Args:
        parser: the command's parser.
    """
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(options: Namespace) -> int:
    """Print the list.

    Args:
        options: the parsed options.

    Returns:
        The exit status, 0.
    """
    from selectivit.models.names import FORMS
    from selectivit.models.weights import list_models

    entries = list_models()
    if options.json:
        print(json.dumps([asdict(entry) for entry in entries], indent=2))
        return 0
    rows = [("name", "library", "parameters", "")]
    rows += [(e.name, e.source, f"{e.params / 1e6:.0f} M", e.note) for e in entries]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    for name, source, params, note in rows:
        print(f"{name:<{widths[0]}}  {source:<{widths[1]}}  {params:>{widths[2]}}  {note}".rstrip())
    print(f"\n{FORMS}")
    return 0
