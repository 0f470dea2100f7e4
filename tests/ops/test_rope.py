"""Axial rotary embeddings against their formula, the two ways of turning, and what is kept."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from selectivit.ops import rope
from selectivit.ops.rope import axial_rotations, moved_coordinates, patch_coordinates, patch_rotations, rotate, rotate_


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    monkeypatch.setattr(rope, "_kept", type(rope._kept)())


def slowly(token, x, y):
    """One head at one place, pair by pair."""
    width = len(token)
    n = width // 4
    out = list(token)
    for pair in range(width // 2):
        place, i = (x, pair) if pair < n else (y, pair - n)
        angle = 0.0 if i >= n - round(n / 8) else 2 * math.pi * place / 100 ** (i / n)
        a, b = token[2 * pair], token[2 * pair + 1]
        out[2 * pair] = a * math.cos(angle) - b * math.sin(angle)
        out[2 * pair + 1] = a * math.sin(angle) + b * math.cos(angle)
    return out


@given(width=st.sampled_from((4, 8, 32, 64)), n=st.integers(1, 4), heads=st.integers(1, 3), seed=st.integers(0, 99))
def test_turning_is_its_formula(width, n, heads, seed):
    tokens, places = draw(2, n, heads, width, seed=seed, dtype=torch.float64), draw(n, 2, seed=seed + 1).double()
    expected = [
        [[slowly(head.tolist(), *p.tolist()) for head in t] for t, p in zip(image, places, strict=True)]
        for image in tokens
    ]
    turned = axial_rotations(places, width)
    torch.testing.assert_close(rotate(tokens, turned), torch.tensor(expected, dtype=torch.float64))
    assert torch.equal(rotate_(tokens.clone(), turned), rotate(tokens, turned))


@pytest.mark.parametrize(("width", "still"), [(4, 0), (32, 1), (64, 2), (128, 4)])
def test_the_lowest_frequencies_stand_still(width, still):
    turned = axial_rotations(torch.tensor([[0.7, 0.7]]), width)[0]  # (D/2, 2)
    stands = (turned == torch.tensor([1.0, 0.0])).all(-1)
    half = width // 4
    assert stands[:half].sum() == stands[half:].sum() == still and stands[half - still : half].all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_complex_and_plain_products_agree(monkeypatch, dtype):
    tokens = draw(2, 6, 3, 16).to(dtype)
    turned = axial_rotations(draw(2, 6, 2, seed=1).double(), 16).to(torch.promote_types(dtype, torch.float32))
    one, written = rotate(tokens, turned), rotate_(tokens.clone(), turned)
    monkeypatch.setattr(rope, "_complex_serves", lambda tokens: False)
    assert one.dtype == dtype and torch.equal(one, written)
    torch.testing.assert_close(one, rotate(tokens, turned))


def test_part_of_a_larger_buffer_is_turned_in_place():
    buffer = draw(2, 9, 3 * 2 * 8)
    before = buffer.clone()
    qk = buffer[..., : 2 * 2 * 8].unflatten(-1, (4, 8))
    turned = axial_rotations(draw(6, 2), 8)
    rotate_(qk[:, 3:], turned)
    torch.testing.assert_close(qk[:, 3:], rotate(before[:, 3:, :32].unflatten(-1, (4, 8)), turned))
    assert torch.equal(buffer[:, :3], before[:, :3]) and torch.equal(buffer[..., 32:], before[..., 32:])


def test_gradients_reach_tokens_and_coordinates():
    tokens, places = draw(1, 3, 2, 8, dtype=torch.float64), draw(3, 2, dtype=torch.float64)
    inputs = (tokens.requires_grad_(), places.requires_grad_())
    assert torch.autograd.gradcheck(lambda t, p: rotate(t, axial_rotations(p, 8)), inputs)


@given(h=st.integers(1, 6), w=st.integers(1, 6))
def test_patch_coordinates_are_middles_row_by_row(h, w):
    expected = [[(i + 0.5) / w * 2 - 1, (j + 0.5) / h * 2 - 1] for j in range(h) for i in range(w)]
    torch.testing.assert_close(patch_coordinates((h, w)), torch.tensor(expected, dtype=torch.float64))


def test_rotations_are_kept_by_size_and_dtype():
    cpu = torch.device("cpu")
    with torch.inference_mode():
        first = patch_rotations((3, 4), 8, cpu)
    assert not first.is_inference() and first.dtype == torch.float32
    assert patch_rotations((3, 4), 8, cpu) is first
    for other in (((4, 3), 8), ((3, 4), 16)):
        assert patch_rotations(*other, cpu) is not first
    assert patch_rotations((3, 4), 8, cpu, torch.float64).dtype == torch.float64
    for side in range(2 * rope.KEPT_TENSORS):
        patch_rotations((1, side + 1), 8, cpu)
    assert len(rope._kept) == rope.KEPT_TENSORS


def test_traced_tensors_are_not_kept():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        patch_rotations((2, 2), 8, torch.device("cpu"))
    assert not rope._kept
    assert type(patch_rotations((2, 2), 8, torch.device("cpu"))) is torch.Tensor


def test_threads_share_what_is_kept():
    expected = {side: axial_rotations(patch_coordinates((side, 2)), 8).float() for side in range(1, 50)}
    wrong = []

    def run():
        for side, rotations in expected.items():
            if not torch.equal(patch_rotations((side, 2), 8, torch.device("cpu")), rotations):
                wrong.append(side)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_moved_coordinates_are_one_shift_and_one_scale():
    torch.manual_seed(0)
    coords = patch_coordinates((3, 4))
    shifts, scales = [], []
    for _ in range(300):
        moved = moved_coordinates(coords, shift=0.08, scale=2.0)
        scale = (moved[1] - moved[0])[0] / (coords[1] - coords[0])[0]
        shift = moved[0] / scale - coords[0]
        torch.testing.assert_close(moved, (coords + shift) * scale)
        scales.append(scale.log2())
        shifts.append(shift)
    scale, shift = torch.stack(scales), torch.stack(shifts)
    assert scale.abs().max() <= 1 and scale.min() < -0.95 and scale.max() > 0.95 and abs(scale.mean()) < 0.1
    assert shift.abs().max() <= 0.08 + 1e-9 and (shift.amax(0) > 0.075).all() and (shift.amin(0) < -0.075).all()
    assert not torch.allclose(shift[:, 0], shift[:, 1])


@pytest.mark.parametrize("width", [0, 2, 6])
def test_widths_that_do_not_split(width):
    with pytest.raises(ValueError, match=f"multiple of 4 wide, got {width}"):
        axial_rotations(torch.zeros(1, 2), width)
