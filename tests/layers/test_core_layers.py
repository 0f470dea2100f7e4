"""The layers of a core-periphery trunk: each against its equation, trained and at inference."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from selectivit.layers.block import CoreBlock
from selectivit.layers.core_attention import CoreAttention
from selectivit.layers.core_bank import CHUNK, CoreBank, spread_points
from selectivit.layers.swiglu import SwiGLU
from selectivit.ops.core_attention import core_mask
from selectivit.ops.rope import axial_rotations, rotate


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def rotations(batch=2, cores=3, patches=8, head_dim=8, dtype=torch.float32):
    core = axial_rotations(torch.rand(batch, cores, 2, dtype=dtype) * 2 - 1, head_dim)
    return core, axial_rotations(torch.rand(patches, 2, dtype=dtype) * 2 - 1, head_dim)


def by_hand(layer, x, core, patch):
    """q, k and v with three products, all turned at once, dense attention under the mask."""
    cores, heads = core.shape[-3], layer.num_heads
    q, k, v = (
        F.linear(x, w, b).unflatten(-1, (heads, -1))
        for w, b in zip(layer.qkv.weight.chunk(3), layer.qkv.bias.chunk(3), strict=True)
    )
    turned = torch.cat([core.expand(len(x), -1, -1, -1), patch.expand(len(x), -1, -1, -1)], 1)
    q, k, v = (t.transpose(1, 2) for t in (rotate(q, turned), rotate(k, turned), v))
    weights = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~core_mask(cores, x.shape[1]), -torch.inf).softmax(-1)
    return layer.proj((weights @ v).transpose(1, 2).flatten(2)), weights


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("own_places", [False, True])
def test_core_attention_by_hand(grad, own_places):
    layer, x, (core, patch) = CoreAttention(16, 2), torch.randn(2, 11, 16), rotations()
    core = core if own_places else core[0]
    expected, weights = by_hand(layer, x, core, patch)
    kept = x.clone()
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(layer(x, core, patch), expected)
        torch.testing.assert_close(layer(x, core, patch, residual=x), expected + x)
        torch.testing.assert_close(layer.core_map(x, core, patch), weights[:, :, :3, 3:])
        torch.testing.assert_close(layer.patch_map(x, core, patch), weights[:, :, 3:, :3])
    assert torch.equal(x, kept)


def test_gradients_equal_those_by_hand():
    layer, x, (core, patch) = (
        CoreAttention(16, 2).double(),
        torch.randn(2, 11, 16).double(),
        rotations(dtype=torch.float64),
    )
    x, core = x.requires_grad_(), core.requires_grad_()
    inputs = (x, core, *layer.parameters())
    found = torch.autograd.grad(layer(x, core, patch).sin().sum(), inputs)
    expected = torch.autograd.grad(by_hand(layer, x, core, patch)[0].sin().sum(), inputs)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_entmax_is_one_argument():
    x, (core, patch) = torch.randn(2, 11, 16) * 3, rotations()
    layer = CoreAttention(16, 2, "entmax15")
    torch.nn.init.normal_(layer.qkv.weight, std=0.6)
    assert (layer.core_map(x, core, patch) == 0).float().mean() > 0.2
    assert (CoreAttention(16, 2, 1.0).core_map(x, core, patch) > 0).all()


@pytest.mark.parametrize("grad", [False, True])
def test_swiglu_and_block_are_their_equations(grad):
    block, x, (core, patch) = CoreBlock(16, 2, 20), torch.randn(2, 11, 16), rotations()
    with torch.set_grad_enabled(grad):
        a, b = block.ffn.fc1(x).chunk(2, -1)
        torch.testing.assert_close(block.ffn(x), block.ffn.fc2(a * a.sigmoid() * b))
        y = x + block.attn(block.norm_attn(x), core, patch)
        torch.testing.assert_close(block(x, core, patch), y + block.ffn(block.norm_ffn(y)))


def test_swiglu_gradients():
    layer = SwiGLU(4, 6).double()
    assert torch.autograd.gradcheck(layer, (torch.randn(1, 3, 4, dtype=torch.float64, requires_grad=True),))


def test_the_bank_gives_its_first_cores():
    bank = CoreBank(20, 8, depth=3)
    tokens, rho = bank(20)
    for count in (1, 7, 8, 9, 16, 20):
        some, places = bank(count)
        assert torch.equal(some, tokens[:count]) and torch.equal(places, rho[:count])
    assert [len(chunk) for chunk in bank.token_chunks] == [CHUNK, CHUNK, 4]
    bank(9)[0].sum().backward()
    assert [chunk.grad is None for chunk in bank.token_chunks] == [False, False, True]
    for count in (0, -3, 21):
        with pytest.raises(ValueError, match=f"budget of 1 to 20 cores, got num_cores={count}"):
            bank(count)
    with pytest.raises(ValueError, match="at least one core"):
        CoreBank(0, 8, depth=3)


def test_cores_move_by_their_own_residual():
    bank = CoreBank(8, 4, depth=4)
    tokens, rho = torch.randn(2, 8, 4), bank(8)[1]
    assert torch.equal(bank.coord_steps, torch.full((3,), 0.01))
    for layer in (1, 2, 3):
        expected = rho + 0.01 * bank.coord_heads[layer - 1](tokens)
        torch.testing.assert_close(bank.move(rho, tokens, layer), expected)


def test_cores_start_as_published():
    bank = CoreBank(64, 384, depth=12)
    tokens, rho = bank(64)
    assert abs(tokens.std() * 384**0.5 - 1) < 0.03
    places = rho.tanh()
    assert places.abs().max() < 0.95 and places[0].norm() < 0.06
    gaps = torch.cdist(places, places).fill_diagonal_(9).amin(1)
    assert gaps.min() > 0.12  # 64 uniform points have pairs far nearer than that
    torch.manual_seed(5)
    assert torch.cdist(u := (torch.rand(64, 2) * 2 - 1) * 0.95, u).fill_diagonal_(9).amin() < 0.1


def test_points_are_chosen_farthest_first():
    torch.manual_seed(3)
    candidates = (torch.rand(1000, 2) * 2 - 1) * 0.95
    torch.manual_seed(3)
    chosen = spread_points(12)
    torch.testing.assert_close(chosen[0], candidates[candidates.norm(dim=1).argmin()])
    for i in range(1, 12):
        distances = torch.cdist(candidates, chosen[:i]).amin(1)
        torch.testing.assert_close(chosen[i], candidates[distances.argmax()])


def test_heads_that_do_not_fit():
    for heads in (3, 0):
        with pytest.raises(ValueError, match=f"divides dim 16, got {heads}"):
            CoreAttention(16, heads)
    with pytest.raises(ValueError, match="multiple of 4 wide, got 6"):
        CoreAttention(12, 2)
