"""The pictures of the tabs as HTML, with their captions, numbers and alternative text."""

from __future__ import annotations

import json

from selectivit.demo.attending import Attend, FeatureMaps, Looked
from selectivit.demo.cores import Budget
from selectivit.demo.layers import COLUMNS, Layers
from selectivit.demo.markup import escape, figure, image, mark, table
from selectivit.demo.photo import Photo
from selectivit.demo.words import Words, hover_data


def about_photo(photo: Photo) -> str:
    """Name the photo that is worked on.

    Args:
        photo: the photo.

    Returns:
        HTML.
    """
    notes = f" ({'; '.join(photo.notes)})" if photo.notes else ""
    size = f"{photo.image.width} × {photo.image.height} px"
    return f'<p class="sv-said" role="status">Photo: <b>{escape(photo.name)}</b>, {size}{escape(notes)}</p>'


def wipe(found: FeatureMaps, attend: Attend) -> str:
    """Both feature maps on one place, with a slider between them.

    Args:
        found: the maps.
        attend: the swap.

    Returns:
        HTML.
    """
    (height, width), (h, w), title = found.shape, found.grid, escape(attend.title)
    layers = "the last layer" if found.replaced == 1 else f"the last {found.replaced} layers"
    under = f"Features with softmax, {h} by {w} patches in joint PCA colours"
    over = f"Features with {attend.title} in the same colours"
    pictures = (
        f'<div class="sv-wipe" style="--at:50%;aspect-ratio:{width}/{height}">'
        f"{image(found.pictures[0], under, found.shape, 'sv-flat')}"
        f"{image(found.pictures[1], over, found.shape, 'sv-flat sv-over')}"
        '<span class="sv-side sv-left" aria-hidden="true">softmax</span>'
        f'<span class="sv-side sv-right" aria-hidden="true">{title}</span>'
        '<input type="range" min="0" max="100" value="50" '
        f'aria-label="Where softmax, on the left, ends and {title}, on the right, begins, per cent of the width"></div>'
    )
    return figure(
        pictures,
        f"Drag the line. {title} in {layers}; one PCA for both: equal colours are equal features "
        f"({100 * found.explained:.0f} % of the variance). Mean cosine of a patch with softmax and with the swap: "
        f"<b>{found.cosine:.3f}</b>.",
    )


def picker(photo_png: bytes, found: FeatureMaps, patch: tuple[int, int]) -> str:
    """The photo as a button that chooses a patch.

    Args:
        photo_png: the photo as the model saw it.
        found: for the grid.
        patch: row and column that are chosen.

    Returns:
        HTML.
    """
    (h, w), (row, column) = found.grid, patch
    label = "Patch whose attention is shown, arrow keys move it"
    button = (
        f'<button type="button" class="sv-pick" data-rows="{h}" data-columns="{w}" data-row="{row}" '
        f'data-column="{column}" data-label="{label}" '
        f'aria-label="{label}: row {row + 1} of {h}, column {column + 1} of {w}">'
        f"{image(photo_png, 'The photo', found.shape)}{mark(found.grid, patch)}</button>"
    )
    return figure(button, "Where does a patch of the last layer look? Click one, or move it by the arrow keys.")


def looked(titles: tuple[str, ...], found: tuple[Looked, ...], shape: tuple[int, int], patch: tuple[int, int]) -> str:
    """Where the chosen patch attends, side by side.

    Args:
        titles: of the passes.
        found: one entry a pass.
        shape: height and width of the pictures, pixels.
        patch: row and column.

    Returns:
        HTML.
    """
    parts = []
    for title, one in zip(titles, found, strict=True):
        spread = "" if one.fewest == one.most else f" ({one.fewest} to {one.most} by head)"
        dark = f"<b>{100 * one.dark:.0f} % of the patches are exactly 0</b> in every head (grey)"
        zeros = "no patch is exactly 0" if one.dark == 0 else dark
        alt = f"Attention of row {patch[0] + 1}, column {patch[1] + 1} with {title}"
        caption = (
            f"<b>{escape(title)}</b>: support {one.support:.1f} of {one.keys} keys{spread}; {zeros}; largest weight "
            f"{one.largest:.3f}. Brighter is more, on one logarithmic scale."
        )
        parts.append(figure(image(one.picture, alt, shape), caption))
    return f'<div class="sv-row" role="status">{"".join(parts)}</div>'


def segmented(found: Words) -> str:
    """The segmentation with its legend, and the classes under the pointer.

    Args:
        found: the segmented photo.

    Returns:
        HTML.
    """
    order = sorted(range(len(found.names)), key=lambda i: -found.shares[i])
    seen = [f"{found.names[i]} {100 * found.shares[i]:.1f} %" for i in order if found.shares[i] > 0]
    data = hover_data(found)
    size = json.dumps({"rows": data["rows"], "columns": data["columns"]})
    items = "".join(
        f'<li><span class="sv-swatch" style="background:{found.colours[i]}"></span>{escape(found.names[i])} '
        f"{100 * found.shares[i]:.1f} %</li>"
        for i in order
    )
    button = (
        f'<button type="button" class="sv-probe" data-size="{escape(size)}" data-grid="{escape(json.dumps(data))}" '
        f'aria-label="Segmentation: {escape(", ".join(seen[:8]))}. Arrow keys move the place whose classes are named.">'
        f"{image(found.picture, 'Segmentation of the photo', found.shape)}"
        f"{mark((data['rows'], data['columns']), (0, 0), hidden=True)}</button>"
        '<output class="sv-told" aria-live="polite">Point at the picture, or use the arrow keys on it.</output>'
    )
    notes = f'<p class="sv-said">{escape("; ".join(found.notes))}</p>' if found.notes else ""
    legend = f'<ul class="sv-legend" aria-label="Classes and their share of the picture">{items}</ul>'
    return f'<div class="sv-segmented">{figure(button, legend)}{notes}</div>'


def budgeted(found: Budget) -> str:
    """Features, cores and cost at a budget.

    Args:
        found: the budget.

    Returns:
        HTML.
    """
    cores, (h, w) = f"{found.num_cores} core{'s' if found.num_cores > 1 else ''}", found.grid
    features = figure(
        image(found.features, f"Features with {cores} in PCA colours", found.shape, "sv-flat"),
        f"Features with <b>{cores}</b>, {h} × {w} patches. The PCA is over 1, 4, 16, all and these cores, so that "
        "colours keep their meaning.",
    )
    places = figure(
        image(found.places, f"Ways of {cores} over the photo", found.shape),
        "Where the cores are: ring in the first layer, dot in the last.",
    )
    numbers = table(
        ("one forward of this photo", cores, f"all {found.largest}"),
        [
            ("GFLOPs, by formula", f"{found.gflops:.2f}", f"{found.gflops_all:.2f}"),
            ("milliseconds, measured now in turns", f"{found.ms:.0f}", f"{found.ms_all:.0f}"),
            ("mean cosine of patches to those with all cores", f"{found.cosine:.3f}", "1"),
        ],
    )
    return (
        f'<div role="status"><div class="sv-row">{features}{places}</div><div class="sv-scroll">{numbers}</div></div>'
    )


def layered(found: Layers) -> str:
    """Curves over the layers, and the numbers behind them.

    Args:
        found: the numbers.

    Returns:
        HTML.
    """
    names = " and ".join(found.table)
    alt = f"Curves over the layers for {names}: " + ", ".join(title for title, _ in COLUMNS.values())
    tables = "".join(_numbers(column, found) for column in COLUMNS)
    return (
        f'<figure class="sv-figure sv-chart">{image(found.picture, alt)}</figure>'
        f'<details class="sv-said"><summary>The numbers</summary><div class="sv-scroll">{tables}</div></details>'
    )


def _numbers(column: str, found: Layers) -> str:
    title, unit = COLUMNS[column]
    rows = [(label, *(f"{value:.3g}" for value in values[column])) for label, values in found.table.items()]
    if any(len(row) == 1 for row in rows):  # the model has no such quantity
        return ""
    return table(("layer", *map(str, range(len(rows[0]) - 1))), rows, f"{title} ({unit})")
