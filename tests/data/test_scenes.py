"""Rendered scenes: the same from the same numbers, exact masks, true captions, folders that others read."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from selectivit.data.scene_folder import LEVELS, NEGATIVES, write_scenes
from selectivit.data.scene_layouts import (
    ATTRIBUTES,
    BACKGROUNDS,
    CLASSES,
    SHAPES,
    Layout,
    Thing,
    caption,
    draw_layout,
    vary,
)
from selectivit.data.scene_rendering import OUTLINES, render, scene
from selectivit.data.scene_textures import BACKDROPS, COLORS


def one(shape="ball", color="red", pattern="plain", material="matte", background="snow", **more) -> Layout:
    thing = Thing(shape, color, pattern, material, **{"x": 50, "y": 40, "radius": 25, "angle": 0.0, **more})
    return Layout(80, 100, (background,), 0.5, (thing,), 3)


def test_a_scene_is_its_seed_and_index():
    one, again, next_one, other = scene(4, 7), scene(4, 7), scene(4, 8), scene(5, 7)
    assert (one.image == again.image).all() and (one.mask == again.mask).all() and one.layout == again.layout
    assert (one.image != next_one.image).any() and (one.image != other.image).any()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(32, 150), st.integers(32, 150))
def test_every_pixel_has_a_class_that_the_layout_names(index, height, width):
    made = scene(1, index, (height, width))
    assert made.image.shape == (height, width, 3) and made.mask.shape == made.instances.shape == (height, width)
    named = {*made.layout.backgrounds, *(thing.shape for thing in made.layout.things)}
    assert {CLASSES[i] for i in np.unique(made.mask)} <= named
    for i, thing in enumerate(made.layout.things):
        assert (made.mask[made.instances == i + 1] == CLASSES.index(thing.shape)).all()
    assert {CLASSES[i] for i in np.unique(made.mask[made.instances == 0])} <= set(made.layout.backgrounds)


def test_masks_follow_the_pictures_edges():
    """A black ball on snow: dark pixels are the mask's, up to the soft edge of one pixel."""
    made = render(one(color="black"))
    dark, inside = made.image.max(-1) < 100, made.mask == CLASSES.index("ball")
    assert inside.sum() == pytest.approx(np.pi * 25**2, rel=0.02)
    assert (dark != inside).sum() < 0.08 * inside.sum()
    assert made.boxes() == {0: (25, 15, 50, 50)}


def test_what_is_in_front_hides_what_is_behind():
    layout = one()
    front = Thing("box", "blue", "plain", "matte", x=60, y=40, radius=20, angle=0.0)
    made = render(Layout(80, 100, ("snow",), 0.5, (*layout.things, front), 3))
    assert (made.mask == CLASSES.index("box")).sum() == (
        render(Layout(80, 100, ("snow",), 0.5, (front,), 3)).instances == 1
    ).sum()
    assert 0 < (made.instances == 1).sum() < (render(layout).instances == 1).sum()
    hidden = Thing("box", "blue", "plain", "matte", x=50, y=40, radius=60, angle=0.0)
    assert list(render(Layout(80, 100, ("snow",), 0.5, (*layout.things, hidden), 3)).boxes()) == [1]


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_fill_their_radius_and_differ(shape):
    made = render(one(shape))
    rows, columns = np.nonzero(made.instances)
    assert 39 <= max(columns.max() - columns.min(), rows.max() - rows.min()) <= 50
    for other in set(SHAPES) - {shape}:
        union = (made.instances > 0) | (render(one(other)).instances > 0)
        both = (made.instances > 0) & (render(one(other)).instances > 0)
        assert both.sum() < 0.88 * union.sum(), f"{shape} and {other} are hard to tell apart"


@pytest.mark.parametrize(("kind", "word"), [(kind, word) for kind, words in ATTRIBUTES.items() for word in words])
def test_every_attribute_is_seen(kind, word):
    """The same seed with another word of the kind gives other pixels, on the object only."""
    words = ATTRIBUTES[kind]
    other = words[(words.index(word) + 1) % len(words)]
    seen, unlike = render(one(**{kind: word})), render(one(**{kind: other}))
    differs = np.abs(seen.image.astype(int) - unlike.image).max(-1) > 12
    inside = (seen.instances > 0) | (unlike.instances > 0)
    assert differs[inside].mean() > 0.15
    grown = np.pad(inside, 3)
    grown = np.any([np.roll(grown, (y, x), (0, 1)) for y in range(-3, 4) for x in range(-3, 4)], 0)[3:-3, 3:-3]
    assert not differs[~grown].any()


def test_colors_are_what_they_are_called():
    for color, rgb in COLORS.items():
        made = render(one(color=color))
        mean = made.image[made.instances > 0].mean(0) / 255
        nearest = min(COLORS, key=lambda name: np.abs(mean - COLORS[name]).sum())
        assert nearest == color, f"{color} {rgb} looks like {nearest}"


def test_names_have_their_drawings():
    assert (
        set(OUTLINES) == set(SHAPES) and set(BACKDROPS) == set(BACKGROUNDS) and set(COLORS) == set(ATTRIBUTES["color"])
    )


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6))
def test_captions_say_what_is_there(seed):
    rng = np.random.default_rng(seed)
    layout = draw_layout(rng)
    text = caption(layout, rng, short=0.3)
    there = {*layout.backgrounds} | {getattr(t, kind) for t in layout.things for kind in ("shape", *ATTRIBUTES)}
    known = {*CLASSES, *(word for words in ATTRIBUTES.values() for word in words)}
    assert set(text.replace(",", "").split()) & known <= there
    full = caption(layout, rng, short=0, always=tuple(ATTRIBUTES))
    biggest = max(layout.things, key=lambda thing: thing.radius)
    assert all(getattr(biggest, kind) in full for kind in ("shape", *ATTRIBUTES))


@pytest.mark.parametrize("what", ["shape", *ATTRIBUTES])
def test_a_variation_differs_in_one_respect(what):
    base = draw_layout(np.random.default_rng(0))
    other = vary(base, np.random.default_rng(1), what)
    for before, after in zip(base.things, other.things, strict=True):
        differ = {name for name in ("shape", *ATTRIBUTES) if getattr(before, name) != getattr(after, name)}
        assert differ == {what}
    assert other.backgrounds == base.backgrounds


def test_a_folder_has_the_layout_of_data_sets(tmp_path):
    files = write_scenes(tmp_path, {"train": 1, "val": 3}, seed=2, size=(64, 80))
    assert [str(f.relative_to(tmp_path)) for f in files] == ["images/train/00000.png"] + [
        f"images/val/0000{i}.png" for i in range(3)
    ]
    classes = json.loads((tmp_path / "classes.json").read_text())
    assert classes == {str(i): name for i, name in enumerate(CLASSES)}
    mask = Image.open(tmp_path / "masks" / "val" / "00001.png")
    assert mask.mode == "L" and mask.size == (80, 64)
    assert (np.asarray(mask) == scene(2001, 1, (64, 80)).mask).all()
    before = {f: f.read_bytes() for f in files}
    assert write_scenes(tmp_path, {"train": 1, "val": 4}, seed=2, size=(64, 80))[:-1] == files
    assert {f: f.read_bytes() for f in files} == before
    with pytest.raises(ValueError, match=r"holds 3 other pictures \(00001.png\)"):
        write_scenes(tmp_path, {"train": 1, "val": 1}, seed=2, size=(64, 80))


def test_negatives_differ_in_as_many_attributes_as_said(tmp_path):
    write_scenes(tmp_path, {"val": 4}, seed=1)
    for kind in (*LEVELS, *ATTRIBUTES):
        content = json.loads((tmp_path / "regions" / "val" / f"{kind}.json").read_text())
        names = {category["id"]: category["name"].split()[1:] for category in content["categories"]}
        assert content["annotations"]
        for entry in content["annotations"]:
            negatives = [names[number] for number in entry["neg_category_ids"]]
            expected = min(NEGATIVES, len(ATTRIBUTES[kind]) - 1) if kind in ATTRIBUTES else NEGATIVES
            assert len(negatives) == len({tuple(n) for n in negatives}) == expected
            right = names[entry["category_id"]]
            for negative in negatives:
                differ = [i for i in range(4) if negative[i] != right[i]]
                assert len(differ) == LEVELS.get(kind, 1)
                if kind in ATTRIBUTES:
                    assert differ == [("pattern", "color", "material").index(kind)]


@pytest.mark.parametrize(
    ("splits", "size"), [({"val": 0}, (64, 64)), ({"val": -1, "train": 3}, (64, 64)), ({"val": 1}, (8, 64))]
)
def test_no_scenes_and_tiny_scenes_are_refused(tmp_path, splits, size):
    with pytest.raises(ValueError, match="expected scenes of 32 px or more and at least one"):
        write_scenes(tmp_path, splits, size=size)
