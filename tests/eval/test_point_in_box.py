"""Point-in-Box: which photos count, and whether the best patch lies in a box."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from selectivit.data.boxes import Box
from selectivit.eval.point_in_box import Rules, Score, patch_scores, target
from selectivit.features import Features

SQUARE = {"resize": 64, "size": 64}


def tokens(patches, cls, grid):
    return Features(patches.mT.unflatten(2, grid), patches, cls, None, None, grid)


def test_a_patch_is_inside_where_its_centre_is():
    found = target([Box("dog", 24, 8, 57, 24)], (64, 64), Rules(**SQUARE), 16)
    # Centres lie at 8, 24, 40 and 56: left and upper edges belong to the box, right and lower ones do not.
    assert found.inside.int().tolist() == [[0, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert found.chance == 3 / 16


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 24), st.integers(1, 24))
def test_inside_agrees_with_looking_up_each_centre(left, top, wide, high):
    found = target([Box("x", left, top, left + wide, top + high)], (64, 64), Rules(max_area=1.0, **SQUARE), 8)
    centres = [(x, y) for y in range(4, 64, 8) for x in range(4, 64, 8)]
    expected = [left <= x < left + wide and top <= y < top + high for x, y in centres]
    if isinstance(found, str):
        assert found == "box without a patch's centre" and not any(expected)
    else:
        assert found.inside.flatten().tolist() == expected


@pytest.mark.parametrize(
    ("boxes", "options", "told"),
    [
        ([], {}, "no object"),
        ([Box("cat", 0, 0, 9, 9)], {"labels": frozenset({"dog"})}, "no object"),
        ([Box("cat", 0, 0, 9, 9), Box("dog", 0, 0, 9, 9)], {}, "several objects"),
        ([Box("cat", 0, 0, 32, 32)], {}, "box over 25 % of the photo"),
        ([Box("cat", 0, 0, 22, 32), Box("dog", 0, 32, 22, 64)], {"objects": "any"}, "box over 25 % of the photo"),
        ([Box("cat", 0, 0, 3, 3)], {}, "box without a patch's centre"),
        ([Box("cat", 0, 0, 10, 60)], {"resize": 64, "size": 32}, "box outside the middle crop"),
    ],
)
def test_photos_that_do_not_count(boxes, options, told):
    assert target(boxes, (64, 64), Rules(**{**SQUARE, **options}), 16) == told


def test_other_objects_do_not_matter_where_a_kind_is_asked_for():
    boxes = [Box("cat", 0, 0, 9, 9), Box("table", 0, 0, 64, 64)]
    assert target(boxes, (64, 64), Rules(labels=frozenset({"cat"}), **SQUARE), 16).inside.sum() == 1
    both = target([*boxes[:1], Box("cat", 50, 50, 60, 60)], (64, 64), Rules("any", **SQUARE), 16)
    assert both.inside.nonzero().tolist() == [[0, 0], [3, 3]]


def test_boxes_that_overlap_are_covered_once():
    boxes = [Box("a", 0, 0, 30, 30), Box("b", 1, 1, 30, 30)]
    assert not isinstance(target(boxes, (64, 64), Rules("any", **SQUARE), 16), str)


def test_scores_are_cosines_with_cls():
    patches, cls = torch.randn(2, 6, 8), torch.randn(2, 8)
    scores = patch_scores(tokens(patches, cls, (2, 3)))
    expected = torch.einsum("bnc,bc->bn", patches, cls) / patches.norm(dim=-1) / cls.norm(dim=-1)[:, None]
    torch.testing.assert_close(scores, expected.unflatten(1, (2, 3)))
    mean = patch_scores(tokens(patches, None, (2, 3)), "mean")
    torch.testing.assert_close(mean, patch_scores(tokens(patches, patches.mean(1), (2, 3))))


def test_scores_without_a_class_token_are_refused():
    with pytest.raises(ValueError, match=r"no class token.*mean"):
        patch_scores(tokens(torch.randn(1, 6, 8), None, (2, 3)))
    with pytest.raises(ValueError, match="cls or mean"):
        patch_scores(tokens(torch.randn(1, 6, 8), None, (2, 3)), "sum")


@pytest.mark.parametrize(
    ("hits", "photos", "low", "high"), [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (5, 10, 0.2366, 0.7634)]
)
def test_intervals_are_wilsons(hits, photos, low, high):
    assert Score(hits, photos).interval() == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize(
    "options", [{"objects": "two"}, {"max_area": 0.0}, {"max_area": 1.5}, {"size": 300}, {"size": 0}]
)
def test_rules_that_are_none(options):
    with pytest.raises(ValueError, match="expected"):
        Rules(**options)
