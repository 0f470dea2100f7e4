"""One page of what probes found: a table a task, curves block by block, photos in PCA colours, papers' numbers beside.

FOLDERS are those that `selectivit probe` wrote, of one or of many models, or folders of such. Nothing is computed anew
but the PCA of --photos. Writes report.html (one file, for any browser), report.md, report.json and pictures/.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from selectivit.cli.options import add_options, option, take
from selectivit.data.writing import check_writable, write_atomic, write_json

HELP = "one page of the results of probes: tables, curves, PCA of photos, papers' numbers beside"


@dataclass(frozen=True)
class ReportOptions:
    """What the page is made of, and where it goes."""

    out: str = option("out", "FOLDER", "folder for the page, made if it is not there")
    title: str = option("Probes of frozen features", "TEXT", "of the page")
    size: int | None = option(None, "PX", "shorter side of --photos in pixels; default: each model's own size")
    device: str = option(
        "auto", "DEVICE", "for --photos: cpu, cuda, cuda:1 or mps; auto is a CUDA card if there is one, else the CPU"
    )


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the kind's options.

    Args:
        parser: the kind's parser.
    """
    parser.add_argument("folders", nargs="+", type=str, help="folders of results, or folders of such")
    parser.add_argument(
        "--photos",
        nargs="+",
        type=str,
        default=[],
        metavar="PATH",
        help="photos, and folders of photos, that are shown in the PCA colours of every model",
    )
    add_options(parser, ReportOptions)


def run(options: Namespace) -> int:
    """Read, put together, write.

    Args:
        options: the parsed options.

    Returns:
        The exit status: 0 all done, 1 a run is unfinished or a photo or model could not be shown.

    Raises:
        ValueError: folders without results, damaged ones, ones of another version.
        WriteError: the folder cannot be written to.
    """
    from selectivit.cli.compare_report import versions
    from selectivit.cli.probes.report_content import Report, as_json, panel_file
    from selectivit.cli.probes.report_curves import curve_picture
    from selectivit.cli.probes.report_markdown import as_markdown
    from selectivit.cli.probes.report_page import as_page
    from selectivit.cli.probes.report_photos import panels_of
    from selectivit.cli.probes.report_reading import read_folders
    from selectivit.cli.probes.report_tables import tables_of
    from selectivit.cli.probes.report_warnings import warnings_of
    from selectivit.cli.progress import progress

    what = take(ReportOptions, options)
    found = read_folders(options.folders)
    out = Path(what.out)
    check_writable(out)
    tables = tables_of(found.runs)
    curves = {number: png for number, table in enumerate(tables) if (png := curve_picture(table)) is not None}
    names = {number: f"curve.{number}.{tables[number].task}.png" for number in curves}
    photos, problems = [], []
    if options.photos:
        models = len({run.model for run in found.runs})
        with progress("models", models, shown=True) as tell:
            photos, problems = panels_of(options.photos, found.runs, what.size, what.device, tell)
    pictures = {names[number]: png for number, png in curves.items()}
    for i, photo in enumerate(photos):
        pictures |= {panel_file(i, j): png for j, png in enumerate([photo.photo, *photo.panels.values()])}
    warnings = [*warnings_of(tables), *problems]
    whole = Report(what.title, tables, pictures, names, photos, warnings, found.unfinished, versions())
    for name, png in pictures.items():
        write_atomic(out / "pictures" / name, png)
    write_json(out / "report.json", as_json(whole))
    write_atomic(out / "report.md", as_markdown(whole, "pictures").encode())
    write_atomic(out / "report.html", as_page(whole).encode())
    for warning in warnings:
        print(f"note: {warning}", file=sys.stderr)
    for each in found.unfinished:
        print(f"unfinished: {each['folder']}: {each['what']}", file=sys.stderr)
    print(f"{len(found.runs)} runs in {len(tables)} tables")
    print(out / "report.html", out / "report.md", out / "report.json", sep="\n")
    return 1 if found.unfinished or problems else 0
