"""A segmentation over its photo with a legend, and as an index picture with a palette."""

from __future__ import annotations

import colorsys
import io
import warnings
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from selectivit.vis.compare import to_png

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BACKGROUND_COLOUR = (0, 0, 0)
LONGEST_SIDE = 1600
"""Pixels of the longer side of the photo in an overlay; larger ones are scaled down."""
LISTED = 24
"""Classes that a legend names; the rest is counted."""
NO_FONT = "(no font)"
"""In a legend in place of a name that no installed font can draw; its number and colour stay."""


def palette(count: int, *, has_background: bool = False) -> Tensor:
    """Colours for classes, neighbours in the list far apart in hue.

    Args:
        count: how many classes, background included.
        has_background: class 0 is background, which is black.

    Returns:
        (count, 3) uint8; the first colours stay the same when classes are added.

    Example:
        >>> palette(3, has_background=True)[0].tolist()
        [0, 0, 0]
    """
    colours: list[tuple[int, int, int]] = [BACKGROUND_COLOUR] if has_background else []
    for i in range(count - len(colours)):
        # The golden ratio's multiples spread over the circle of hues; brightness and saturation change more slowly.
        hue, value, saturation = i * 0.61803399 % 1, (0.95, 0.7, 0.82)[i // 3 % 3], (0.85, 0.6)[i // 9 % 2]
        red, green, blue = colorsys.hsv_to_rgb(hue, saturation, value)
        colours.append((round(255 * red), round(255 * green), round(255 * blue)))
    return torch.tensor(colours, dtype=torch.uint8).reshape(-1, 3)


def index_png(index_map: Tensor, colours: Tensor) -> bytes:
    """The index map as a PNG that holds the indices themselves, shown in the classes' colours.

    Args:
        index_map: (H, W), indices from 0.
        colours: (classes, 3) uint8.

    Returns:
        The file's bytes: 8 bits with a palette; 16-bit grey without one, where there are more than 256 classes.

    Example:
        >>> index_png(torch.tensor([[0, 1]]), palette(2))[1:4]
        b'PNG'
    """
    from PIL import Image

    if len(colours) <= 256:
        image = Image.fromarray(index_map.to(torch.uint8).numpy())
        image.putpalette(colours.flatten().tolist())
    else:
        image = Image.fromarray(index_map.to(torch.int32).numpy().astype("uint16"))
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


def overlay_png(
    photo: Tensor,
    index_map: Tensor,
    names: Sequence[str],
    *,
    has_background: bool = False,
    title: str = "",
    opacity: float = 0.55,
) -> bytes:
    """Draw a segmentation over its photo, with a legend of the classes that are in it, the largest first.

    Args:
        photo: (H, W, 3), float in 0..1.
        index_map: (H, W), indices into the names.
        names: of all classes, in any script.
        has_background: class 0 is background: the photo shows through, pale.
        title: above the photo.
        opacity: of the colours, 0..1.

    Returns:
        The bytes of a PNG file; the same input gives the same bytes.

    Raises:
        ValueError: photo and index map of different size.

    Example:
        >>> overlay_png(torch.rand(28, 28, 3), torch.zeros(28, 28), ["road"])[1:4]
        b'PNG'
    """
    if photo.shape[:2] != index_map.shape:
        raise ValueError(f"expected a photo and an index map of one size, got {photo.shape} and {index_map.shape}")
    shares = torch.bincount(index_map.long().flatten(), minlength=len(names)) / index_map.numel()
    colours = palette(len(names), has_background=has_background)
    blended = blend(*_shrunk(photo, index_map), colours, opacity, has_background)
    shown = [name if drawable(name) else NO_FONT for name in names]
    title = "".join(sign if drawable(sign) else "?" for sign in title)
    with warnings.catch_warnings():  # from fonts that matplotlib tries before the one that has the sign
        warnings.filterwarnings("ignore", message=r".*[Gg]lyph.*missing", category=UserWarning)
        return to_png(_figure(blended, shares, shown, colours, has_background, title))


def _shrunk(photo: Tensor, index_map: Tensor) -> tuple[Tensor, Tensor]:
    height, width = index_map.shape
    scale = LONGEST_SIDE / max(height, width)
    if scale >= 1:
        return photo, index_map
    size = (max(1, round(height * scale)), max(1, round(width * scale)))
    small = F.interpolate(photo.permute(2, 0, 1)[None], size, mode="area")[0].permute(1, 2, 0)
    rows, columns = (torch.arange(new) * old // new for new, old in zip(size, (height, width), strict=True))
    return small, index_map[rows][:, columns]


def blend(
    photo: Tensor, index_map: Tensor, colours: Tensor, opacity: float = 0.55, has_background: bool = False
) -> Tensor:
    """Lay the classes' colours on the photo, with white lines where classes meet.

    Args:
        photo: (H, W, 3), float in 0..1.
        index_map: (H, W), indices of the colours.
        colours: (classes, 3) uint8.
        opacity: of the colours, 0..1.
        has_background: class 0 is background: the photo shows through, pale.

    Returns:
        (H, W, 3) float32 in 0..1.

    Example:
        >>> blend(torch.ones(2, 2, 3), torch.zeros(2, 2), palette(1)).shape
        torch.Size([2, 2, 3])
    """
    index = index_map.long()
    mixed = torch.lerp(photo.float(), colours[index].float() / 255, opacity)
    if has_background:
        pale = (0.35 + 0.5 * photo.float().mean(-1, keepdim=True)).expand_as(photo)
        mixed = torch.where((index == 0)[..., None], pale, mixed)
    edge = torch.zeros_like(index, dtype=torch.bool)
    edge[1:] |= index[1:] != index[:-1]
    edge[:, 1:] |= index[:, 1:] != index[:, :-1]
    return torch.where(edge[..., None], 1.0, mixed).clamp(0, 1)


def _figure(
    blended: Tensor, shares: Tensor, names: Sequence[str], colours: Tensor, has_background: bool, title: str
) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    height, width = blended.shape[:2]
    side = 8.0  # inches of the photo's longer side
    high, wide = (max(1.2, side * part / max(height, width)) for part in (height, width))
    order = [int(i) for i in shares.argsort(descending=True, stable=True) if shares[i] > 0]
    listed = order[:LISTED]
    tall = max(high, 0.27 * (len(listed) + (len(order) > LISTED)) + 0.3)
    legend_wide = 0.9 + 0.09 * max(len(_short(names[i])) + 12 for i in listed)
    figure = Figure(figsize=(wide + legend_wide + 0.3, tall + 0.6), dpi=130)
    whole_wide, whole_tall = figure.get_size_inches()
    photo_place = (0.15 / whole_wide, (whole_tall - 0.45 - high) / whole_tall, wide / whole_wide, high / whole_tall)
    axes = figure.add_axes(photo_place)
    axes.imshow(blended.numpy(), interpolation="nearest" if max(height, width) < 400 else "antialiased", aspect="auto")
    axes.set(xticks=[], yticks=[])
    fonts = _fonts()
    if title:
        axes.set_title(title, fontsize=11, loc="left", fontfamily=fonts, parse_math=False)
    seen = colours / 255.0
    if has_background:
        seen[0] = 0.8  # as pale as the photo is there
    red, green, blue = seen.T.tolist()
    handles = [Patch(facecolor=(red[i], green[i], blue[i]), edgecolor="0.4") for i in listed]
    # A share that rounds to nothing is still there: say so.
    texts = [f"{i}  {_short(names[i])}  {_percent(shares[i].item())}" for i in listed]
    if len(order) > LISTED:
        handles.append(Patch(facecolor="none", edgecolor="none"))
        texts.append(f"and {len(order) - LISTED} more")
    anchor = ((wide + 0.25) / whole_wide, (whole_tall - 0.42) / whole_tall)
    legend = figure.legend(handles, texts, loc="upper left", bbox_to_anchor=anchor, frameon=False, fontsize=10)
    for text in legend.get_texts():
        text.set(parse_math=False, fontfamily=fonts)  # a label may hold $
    return figure


def _percent(share: float) -> str:
    return "< 0.1 %" if share < 0.0005 else f"{100 * share:.1f} %"


def _short(name: str, length: int = 40) -> str:
    return name if len(name) <= length else f"{name[: length - 1]}…"


@cache
def _fonts() -> list[str]:
    """Matplotlib's own font, then installed ones that know other scripts."""
    from matplotlib.font_manager import fontManager

    wanted = ("CJK", "Noto Sans", "WenQuanYi", "Droid Sans Fallback", "Arial Unicode", "Unifont")
    found = {font.name for font in fontManager.ttflist if any(word in font.name for word in wanted)}
    return ["DejaVu Sans", *sorted(found, key=lambda name: ("CJK" not in name, name))]


@cache
def _signs() -> frozenset[int]:
    """The code points that one of the fonts has."""
    from matplotlib.font_manager import findfont, get_font

    return frozenset().union(*(get_font(findfont(name)).get_charmap() for name in _fonts()))


def drawable(text: str) -> bool:
    """Tell whether the installed fonts have all signs of a text.

    Args:
        text: in any script.

    Returns:
        False where a picture would show boxes.

    Example:
        >>> drawable("road"), drawable("\U000f0000")
        (True, False)
    """
    return all(ord(sign) in _signs() or sign.isspace() for sign in text)
