"""What stands where in a rendered scene, drawn at random from a seed, and the sentences that say so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

SHAPES = ("ball", "box", "triangle", "star", "heart", "ring", "cross", "moon", "arrow", "bottle")
BACKGROUNDS = ("sky", "grass", "wood", "brick", "water", "sand", "snow", "tiles")
CLASSES = SHAPES + BACKGROUNDS  # a mask's number is a place in here
ATTRIBUTES = {
    "color": ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white"),
    "pattern": ("plain", "striped", "dotted", "checkered"),
    "material": ("matte", "shiny", "metal", "wooden", "furry", "glass"),
}
MOST_NAMED = 3  # objects in one caption: the largest
UNSAID = ("plain", "matte")  # what most captions pass over

FULL = ("{}", "a photo of {}", "a picture of {}", "an image of {}", "{} in a photo", "a scene with {}", "there is {}")
PLACES = (" on {}", " in front of {}", ", {} behind", " against {}", " with {} in the background", " near {}")
SHORT = ("{}", "a {}", "the {}", "a photo of a {}", "a photo of the {}", "a picture of a {}", "an image of a {}")


@dataclass(frozen=True)
class Thing:
    """One object of a scene.

    Args:
        shape: one of `SHAPES`.
        color: of `ATTRIBUTES`, as the next two.
        pattern: as above.
        material: as above.
        x: of its centre, in pixels from the left.
        y: of its centre, in pixels from the top.
        radius: in pixels.
        angle: by which it is turned, in radians.
    """

    shape: str
    color: str
    pattern: str
    material: str
    x: float
    y: float
    radius: float
    angle: float


@dataclass(frozen=True)
class Layout:
    """A scene before it is rendered.

    Args:
        height: in pixels.
        width: in pixels.
        backgrounds: one, or two that share the picture, the first above.
        horizon: where the second begins, as a share of the height.
        things: objects, those in front last.
        seed: of the textures.
    """

    height: int
    width: int
    backgrounds: tuple[str, ...]
    horizon: float
    things: tuple[Thing, ...]
    seed: int


def draw_layout(
    rng: np.random.Generator,
    size: tuple[int, int] = (240, 320),
    things: tuple[int, int] = (2, 5),
    radius: tuple[float, float] = (18, 60),
) -> Layout:
    """Draw a scene.

    Args:
        rng: where chance comes from.
        size: (height, width) in pixels.
        things: least and largest number of objects; fewer where they find no room.
        radius: least and largest, in pixels.

    Returns:
        The layout: no object has its centre under another, and parts may be hidden.

    Example:
        >>> layout = draw_layout(np.random.default_rng(0))
        >>> 1 <= len(layout.things) <= 5, layout.backgrounds[0] in BACKGROUNDS
        (True, True)
    """
    height, width = size
    largest = min(radius[1], 0.46 * min(size))
    found: list[Thing] = []
    for _ in range(int(rng.integers(things[0], things[1] + 1))):
        for _ in range(12):
            r = float(np.exp(rng.uniform(np.log(min(radius[0], largest)), np.log(largest))))
            x, y = (float(rng.uniform(0.75 * r, side - 0.75 * r)) for side in (width, height))
            if all(np.hypot(x - other.x, y - other.y) > 0.95 * max(r, other.radius) for other in found):
                found.append(Thing(**_kind(rng), x=x, y=y, radius=r, angle=float(rng.uniform(-0.6, 0.6))))
                break
    backgrounds = rng.choice(len(BACKGROUNDS), 1 + int(rng.random() < 0.5), replace=False)
    horizon = float(rng.uniform(0.3, 0.7))
    names = tuple(BACKGROUNDS[i] for i in backgrounds)
    return Layout(height, width, names, horizon, tuple(found), int(rng.integers(2**31)))


def _kind(rng: np.random.Generator) -> dict[str, str]:
    """Shape, colour, pattern and material; plain and matte are as frequent as the others together."""
    drawn = {"shape": _pick(rng, SHAPES), **{name: _pick(rng, words) for name, words in ATTRIBUTES.items()}}
    if rng.random() < 0.35:
        drawn["pattern"] = "plain"
    if rng.random() < 0.4:
        drawn["material"] = "matte"
    return drawn


def _pick(rng: np.random.Generator, words: Sequence[str]) -> str:
    return words[int(rng.integers(len(words)))]


def vary(layout: Layout, rng: np.random.Generator, what: str) -> Layout:
    """The same scene where every object differs in one respect, its objects moved a little: a hard negative.

    Args:
        layout: the scene.
        rng: where chance comes from.
        what: "shape", or a key of `ATTRIBUTES`.

    Returns:
        The other scene.

    Example:
        >>> one = draw_layout(np.random.default_rng(0))
        >>> other = vary(one, np.random.default_rng(1), "color")
        >>> one.things[0].shape == other.things[0].shape, one.things[0].color == other.things[0].color
        (True, False)
    """
    words = SHAPES if what == "shape" else ATTRIBUTES[what]
    things = tuple(
        replace(
            thing,
            **{what: _pick(rng, [word for word in words if word != getattr(thing, what)])},
            x=thing.x + float(rng.uniform(-6, 6)),
            y=thing.y + float(rng.uniform(-6, 6)),
            angle=float(rng.uniform(-0.6, 0.6)),
        )
        for thing in layout.things
    )
    return replace(layout, things=things, seed=int(rng.integers(2**31)))


def phrase(thing: Thing, rng: np.random.Generator, said: float = 0.7, always: Sequence[str] = ()) -> str:
    """Name an object with some of its attributes, without an article.

    Args:
        thing: the object.
        rng: where chance comes from.
        said: the chance of each attribute to be named; "plain" and "matte" have a fifth of it.
        always: attributes that are named in any case.

    Returns:
        Such as "striped red wooden ball".

    Example:
        >>> thing = Thing("ball", "red", "striped", "wooden", 0, 0, 9, 0)
        >>> sorted(phrase(thing, np.random.default_rng(0), said=1).split())
        ['ball', 'red', 'striped', 'wooden']
    """
    kept = []
    for name in ("pattern", "color", "material"):
        word = getattr(thing, name)
        if name in always or rng.random() < said * (0.2 if word in UNSAID else 1):
            kept.append(word)
    if rng.random() < 0.3:
        rng.shuffle(kept)
    return " ".join([*kept, thing.shape])


def caption(
    layout: Layout,
    rng: np.random.Generator,
    *,
    short: float = 0.25,
    always: Sequence[str] = (),
    templates: Sequence[str] = SHORT,
) -> str:
    """Say what a scene shows, in one of many ways.

    Args:
        layout: the scene.
        rng: where chance comes from.
        short: the chance that one object, or one background, is all that is said.
        always: attributes that are named of every object.
        templates: of the short ones, each with one {}.

    Returns:
        A sentence without a full stop.

    Example:
        >>> layout = draw_layout(np.random.default_rng(3), things=(1, 1))
        >>> layout.things[0].shape in caption(layout, np.random.default_rng(0), short=0)
        True
    """
    if rng.random() < short:
        template = _pick(rng, templates)
        if not layout.things or rng.random() < 0.25:
            return template.format(_pick(rng, layout.backgrounds))
        biggest = max(layout.things, key=lambda thing: thing.radius)
        return template.format(phrase(biggest, rng, 0.45, always))
    order = rng.permutation(sorted(range(len(layout.things)), key=lambda i: -layout.things[i].radius)[:MOST_NAMED])
    named = [_with_article(phrase(layout.things[i], rng, 0.7, always), rng) for i in order]
    said = _joined(named) if named else "nothing"
    text = _pick(rng, FULL).format(said)
    if rng.random() < 0.7:
        text += _pick(rng, PLACES).format(" and ".join(layout.backgrounds))
    return text


def _with_article(words: str, rng: np.random.Generator) -> str:
    article = "an" if words[0] in "aeiou" else "a"
    return f"{'the' if rng.random() < 0.1 else article} {words}"


def _joined(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
