"""Serve a web page to try the library in a browser: features, segmentation by words, budgets of cores, layers.

It listens on this machine alone unless --host says otherwise, needs no network with the models that come with the
package, and keeps uploads for half an hour at most. Ctrl-C ends it.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser, Namespace

from selectivit.cli.options import add_options, option, pick_device, take

if TYPE_CHECKING:
    from selectivit.demo.answers import Answers
    from selectivit.demo.page import Start
    from selectivit.demo.photo import Limits

HELP = "serve a web page to try the library in a browser"
MOST_OFFERED = 40


@dataclass(frozen=True)
class DemoOptions:
    """What the page begins with, and whom it serves."""

    model: str = option("dinov2-small", "NAME", "model whose attention is swapped; see `selectivit models`")
    clip: str | None = option(
        None, "NAME", "CLIP of the tab Segment; default: the one that comes with the package, if there is one"
    )
    veca: str = option("veca-tiny", "NAME", "core-periphery model of the tab Budget")
    size: int = option(336, "PX", "photo's shorter side at the start in the tabs Features and Budget")
    device: str = option(
        "auto", "DEVICE", "cpu, cuda, cuda:1 or mps; auto is a CUDA card if there is one, else the CPU"
    )
    host: str = option("127.0.0.1", "ADDRESS", "address to listen on; 0.0.0.0 is every address of this machine")
    port: int = option(7860, "N", "port to listen on")
    root_path: str = option("", "PATH", "path under which a proxy serves the page, such as /demo")
    max_megabytes: float = option(20.0, "MB", "largest file that may be uploaded")
    max_megapixels: float = option(50.0, "MP", "largest picture that may be uploaded")
    any_model: bool | None = option(
        None,
        "BOOL",
        "whether visitors may name any model or folder of this machine; default: only where none but this machine "
        "reaches the page",
    )


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the command's options.

    Args:
        parser: the command's parser.
    """
    parser.add_argument("photos", nargs="*", type=str, help="photos that the page offers, and folders of photos")
    add_options(parser, DemoOptions)


def run(options: Namespace) -> int:
    """Serve until interrupted.

    Args:
        options: the parsed options.

    Returns:
        The exit status, 0.

    Raises:
        ImportError: gradio is missing.
        OSError: the port is taken.
        ValueError: no photos where some were named, or limits that are not positive.
    """
    what = take(DemoOptions, options)
    answers, start = prepare(what, options.photos)
    from selectivit.demo.serve import launch

    page = launch(answers, start, what.host, what.port, what.root_path)
    print(f"{page.local_url} serves the page; Ctrl-C ends it", flush=True)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        print("ended", file=sys.stderr)
    finally:
        page.close(verbose=False)
    return 0


def prepare(what: DemoOptions, photos: list[str]) -> tuple[Answers, Start]:
    """Make ready what the page needs, its models loaded, so that the first picture does not wait for them.

    Args:
        what: the options.
        photos: files and folders.

    Returns:
        Answers, and what the page begins with.
    """
    from selectivit.demo.serve import need_gradio

    need_gradio()  # before models are loaded: to wait and then hear that it is missing is no fun
    from selectivit.demo.answers import MIDDLE, Answers
    from selectivit.demo.attending import Attend
    from selectivit.demo.memory import Memory
    from selectivit.demo.page import Start
    from selectivit.demo.photo import Limits
    from selectivit.demo.serve import LOOPBACK
    from selectivit.demo.shelf import Shelf
    from selectivit.demo.words import default_clip

    if what.max_megabytes <= 0 or what.max_megapixels <= 0:
        raise ValueError("expected --max-megabytes and --max-megapixels above 0")
    found = _readable(photos, Limits(what.max_megabytes, what.max_megapixels))
    start = Start(what.model, default_clip(what.clip), what.veca, what.size)
    any_name = what.host in LOOPBACK if what.any_model is None else what.any_model
    names = [name for name in (start.model, start.clip, start.veca) if name]
    shelf = Shelf(names, any_name=any_name, device=str(pick_device(what.device, 0)))
    answers = Answers(shelf, Memory(400), Limits(what.max_megabytes, what.max_megapixels), found)
    began = time.perf_counter()
    for load, name in ((shelf.model, start.veca), (shelf.model, start.model), (shelf.clip, start.clip)):
        if name:
            _load(load, name)
    # The page's first answer, so that whoever opens it does not wait; what is wrong with the model is told there too.
    answers.features(answers.offered_photo(0), MIDDLE, start.model, start.size, Attend())
    print(f"models are ready after {time.perf_counter() - began:.1f} s", file=sys.stderr)
    return answers, start


def _load(use: Callable[[str], AbstractContextManager[object]], name: str) -> None:
    """Load a model; one that cannot be had is told here and on its tab, and the other tabs work."""
    try:
        with use(name):
            pass
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        print(f"selectivit demo: {name} is not ready: {error}", file=sys.stderr)


def _readable(paths: list[str], limits: Limits) -> tuple[Path, ...]:
    """The photos that the page offers; the others are named."""
    from selectivit.data.find import find_images
    from selectivit.data.images import ImageError
    from selectivit.demo.photo import open_photo

    found, problems = find_images(paths)
    kept: list[Path] = []
    for image in found[:MOST_OFFERED]:
        try:
            open_photo(image.path, limits)
        except ImageError as error:
            problems.append(str(error))
        else:
            kept.append(image.path)
    if len(found) > MOST_OFFERED:
        problems.append(f"of {len(found)} photos the page offers the first {MOST_OFFERED}")
    for line in problems:
        print(f"selectivit demo: {line}", file=sys.stderr)
    if paths and not kept:
        raise ValueError(f"no photo can be read among {', '.join(paths)}")
    return tuple(kept)
