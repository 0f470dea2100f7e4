"""Windows, and maps made out row by row, against torch's own interpolation of whole maps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from selectivit.openvocab import windows
from selectivit.openvocab.refine import refine
from selectivit.openvocab.windows import averaged, blocks, sliding_windows, whole

SIDES = st.integers(1, 12)


@given(h=SIDES, w=SIDES, new_h=st.integers(1, 30), new_w=st.integers(1, 30), step=st.integers(1, 5))
def test_blocks_are_torchs_bilinear(h, w, new_h, new_w, step):
    values = torch.randn(3, h, w)
    want = F.interpolate(values[None], (new_h, new_w), mode="bilinear", align_corners=False)[0]
    found = torch.full_like(want, float("nan"))
    before, windows.BLOCK_ELEMENTS = windows.BLOCK_ELEMENTS, step * 3 * max(w, new_w)
    try:
        seen = 0
        for place, block in blocks(whole(values), (h, w), (new_h, new_w), 3):
            assert block.shape[1] <= step
            found[:, place], seen = block, seen + 1
    finally:
        windows.BLOCK_ELEMENTS = before
    assert seen >= new_h / step
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)


@given(height=st.integers(1, 90), width=st.integers(1, 90), window=st.integers(1, 40), part=st.integers(1, 40))
def test_windows_cover_the_picture_and_stay_inside(height, width, window, part):
    stride = min(part, window)
    cover = torch.zeros(height, width)
    found = sliding_windows((height, width), window, stride)
    for w in found:
        assert w.height == min(window, height) and w.width == min(window, width)
        assert w.top + w.height <= height and w.left + w.width <= width
        cover[w.top : w.top + w.height, w.left : w.left + w.width] += 1
    assert cover.min() >= 1 and len(set(found)) == len(found)


def test_windows_are_averaged_as_a_whole_canvas_would_be():
    torch.manual_seed(0)
    size, queries = (40, 56), 3
    boxes = sliding_windows(size, 24, 16)
    parts = [(box, torch.randn(queries, 3, 3)) for box in boxes]
    total, count = torch.zeros(queries, *size), torch.zeros(size)
    for box, values in parts:
        place = (slice(box.top, box.top + 24), slice(box.left, box.left + 24))
        total[:, place[0], place[1]] += F.interpolate(values[None], (24, 24), mode="bilinear")[0]
        count[place] += 1
    want = total / count
    rows = averaged(parts, size[1])
    found = torch.cat([rows(a, min(a + 7, 40)) for a in range(0, 40, 7)], 1)
    torch.testing.assert_close(found, want)


# ---- refinement


def slow_refine(maps, picture, iterations, dilations, sharpness):
    height, width = maps.shape[1:]

    def at(y, x):
        return min(max(y, 0), height - 1), min(max(x, 0), width - 1)

    for _ in range(iterations):
        new = torch.zeros_like(maps)
        for y in range(height):
            for x in range(width):
                spots = [at(y + far * dy, x + far * dx) for far in dilations for dy in (-1, 0, 1) for dx in (-1, 0, 1)]
                spots = [s for i, s in enumerate(spots) if i % 9 != 4]
                around = torch.stack([picture[:, y, x], *(picture[:, a, b] for a, b in spots)])
                spread = around.std(0) + 1e-8
                logits = torch.stack([-sharpness * ((p - picture[:, y, x]).abs() / spread).mean() for p in around[1:]])
                for weight, (a, b) in zip(logits.softmax(0), spots, strict=True):
                    new[:, y, x] += weight * maps[:, a, b]
        maps = new
    return maps


def test_refine_against_a_loop():
    torch.manual_seed(0)
    maps, picture = torch.randn(18, 5, 6), torch.rand(3, 5, 6)
    want = slow_refine(maps, picture, 2, (1, 3), 10.0)
    torch.testing.assert_close(
        refine(maps.clone(), picture, iterations=2, dilations=(1, 3)), want, atol=1e-5, rtol=1e-4
    )


def test_refine_draws_an_edge_to_the_pictures_own():
    picture = torch.zeros(3, 24, 24)
    picture[:, :, 12:] = 1.0
    picture += 0.01 * torch.rand(3, 24, 24)
    truth = (torch.arange(24) >= 12).float().expand(24, 24)
    coarse = (torch.arange(24) >= 15).float().expand(24, 24)  # three columns too far
    maps = torch.stack([1 - coarse, coarse])
    found = refine(maps.clone(), picture, iterations=10, dilations=(1, 4)).argmax(0).float()
    assert (found == truth).float().mean() > (coarse == truth).float().mean() + 0.05


def test_refine_keeps_what_is_flat_and_says_what_is_wrong():
    ones = torch.ones(2, 4, 4)
    torch.testing.assert_close(refine(ones.clone(), torch.zeros(3, 4, 4)), ones)
    with pytest.raises(ValueError, match="maps"):
        refine(torch.ones(2, 4, 4), torch.zeros(3, 4, 5))
    with pytest.raises(ValueError, match="1 or more"):
        refine(ones, torch.zeros(3, 4, 4), iterations=0)
