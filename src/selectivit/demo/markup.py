"""HTML that every picture of the page is made of: text that is safe, images with alternative text, marks."""

from __future__ import annotations

import base64
import html


def escape(text: str) -> str:
    """Make text safe between tags and in attributes, for the page's templates too.

    Args:
        text: any.

    Returns:
        The same text as HTML.

    Example:
        >>> escape("<b> ${x} {{y}}")
        '&lt;b&gt; &#36;&#123;x&#125; &#123;&#123;y&#125;&#125;'
    """
    found = html.escape(text, quote=True)
    for sign in "${}`":
        found = found.replace(sign, f"&#{ord(sign)};")
    return found


def problem(error: Exception) -> str:
    """Say what went wrong, and what to do, where the picture would be.

    Args:
        error: with a text for people.

    Returns:
        HTML.

    Example:
        >>> problem(ValueError("expected a label"))
        '<p class="sv-problem" role="alert">expected a label</p>'
    """
    return f'<p class="sv-problem" role="alert">{escape(str(error))}</p>'


def image(png: bytes, alt: str, shape: tuple[int, int] | None = None, classes: str = "") -> str:
    """An image that holds its bytes, so that nothing is left on a disk and nothing is fetched.

    Args:
        png: the file's bytes.
        alt: what it shows, for those who do not see it.
        shape: height and width to be stretched over; None is the picture's own.
        classes: of the element.

    Returns:
        HTML.

    Example:
        >>> image(b"x", "a photo")
        '<img class="" alt="a photo" src="data:image/png;base64,eA==" draggable="false">'
    """
    size = "" if shape is None else f' style="aspect-ratio:{shape[1]}/{shape[0]}"'
    source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    return f'<img class="{classes}"{size} alt="{escape(alt)}" src="{source}" draggable="false">'


def mark(grid: tuple[int, int], patch: tuple[int, int], *, hidden: bool = False) -> str:
    """A frame around one patch of the picture before it.

    Args:
        grid: rows and columns.
        patch: row and column.
        hidden: until a script shows it.

    Returns:
        HTML.

    Example:
        >>> mark((2, 4), (1, 0))
        '<span class="sv-mark" style="top:50%;left:0%;height:50%;width:25%"></span>'
    """
    top, left = (100 * at / of for at, of in zip(patch, grid, strict=True))
    place = f"top:{top:g}%;left:{left:g}%;height:{100 / grid[0]:g}%;width:{100 / grid[1]:g}%"
    return f'<span class="sv-mark"{" hidden" if hidden else ""} style="{place}"></span>'


def figure(content: str, caption: str) -> str:
    """A picture and what is to be known of it.

    Args:
        content: HTML.
        caption: HTML.

    Returns:
        HTML.

    Example:
        >>> figure("<img>", "a photo")
        '<figure class="sv-figure"><img><figcaption>a photo</figcaption></figure>'
    """
    return f'<figure class="sv-figure">{content}<figcaption>{caption}</figcaption></figure>'


def table(head: tuple[str, ...], rows: list[tuple[str, ...]], caption: str = "") -> str:
    """A table of numbers, its first column naming the rows.

    Args:
        head: texts of the first row.
        rows: texts.
        caption: text above it.

    Returns:
        HTML.

    Example:
        >>> table(("", "a"), [("b", "1")]).count("<th")
        4
    """
    top = "".join(f'<th scope="col">{escape(text)}</th>' for text in head)
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>{"".join(f"<td>{escape(text)}</td>" for text in row[1:])}</tr>'
        for row in rows
    )
    above = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f'<table class="sv-table">{above}<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>'
