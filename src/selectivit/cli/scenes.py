"""Render scenes of objects on textured backgrounds, with exact masks, for trying out segmentation and regions offline.

The folder has the layout that `segment` and the evaluations read: images/val, masks/val, classes.json; and regions/val
with captions and hard negatives in the style of FG-OVD. Same seed, same pictures.
"""

from __future__ import annotations

from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from selectivit.cli.progress import progress
from selectivit.data.writing import check_writable

HELP = "render scenes with exact masks, to try segmentation and regions offline"


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the command's options.

    Args:
        parser: the command's parser.
    """
    parser.add_argument("--out", type=str, default="out/scenes", metavar="FOLDER", help="folder for the scenes")
    parser.add_argument("--val", type=int, default=300, metavar="N", help="scenes of the split val")
    parser.add_argument("--train", type=int, default=0, metavar="N", help="scenes of the split train")
    parser.add_argument("--height", type=int, default=240, metavar="PX", help="of the pictures")
    parser.add_argument("--width", type=int, default=320, metavar="PX", help="of the pictures")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of all random numbers")


def run(options: Namespace) -> int:
    """Render.

    Args:
        options: the parsed options.

    Returns:
        The exit status, 0.

    Raises:
        ValueError: no scenes, or scenes that are too small.
        WriteError: the folder cannot be written to.
    """
    from selectivit.data.scene_folder import write_scenes

    out = Path(options.out)
    check_writable(out)
    splits = {"train": options.train, "val": options.val}
    size = (options.height, options.width)
    with progress("scenes", max(0, sum(splits.values()))) as tell:
        files = write_scenes(out, splits, seed=options.seed, size=size, tell=tell)
    print(f"{out}: {len(files)} scenes with masks, classes.json and regions")
    return 0
