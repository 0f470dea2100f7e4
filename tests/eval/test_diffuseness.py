"""Diffuseness against its definition, spelt out over whole matrices; and what it refuses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import selectivit as sv
from selectivit.eval.diffuseness import UNLABELLED, diffuseness, patch_classes
from selectivit.ops.selective import AttentionRule

SOURCES = ("qk", "qq", "kk", "vv", "qq+kk", "qq+kk+vv")
RULES = [AttentionRule(n, alpha=1.3, scores=s) for s in SOURCES for n in ("softmax", "entmax")]


@pytest.fixture(scope="module")
def vit():
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    options = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 2, "num_classes": 0}
    model = timm.models.VisionTransformer(**options, reg_tokens=2, dynamic_img_size=True)
    for block in model.blocks:
        nn.init.normal_(block.attn.qkv.weight, std=0.5)
    return model.eval()


def by_definition(weights, classes, prefix, background):
    """(measures, heads), query by query; weights (H, L, L) of one layer."""
    rows = []
    for i, own in enumerate(classes.tolist()):
        if own in (UNLABELLED, background):
            continue
        row = weights[:, prefix + i]
        patches = row[:, prefix:]
        others = torch.arange(len(classes)) != i
        labelled = classes != UNLABELLED
        entropy = -(row * row.clamp_min(1e-30).log()).sum(-1)
        rows.append(
            [
                patches[:, others & (classes == own)].sum(-1),
                patches[:, labelled & (classes != own)].sum(-1),
                patches[:, i],
                patches[:, ~labelled].sum(-1),
                row[:, :prefix].sum(-1),
                entropy.exp(),
                (row > 0).double().mean(-1),
            ]
        )
    return torch.stack([torch.stack(row) for row in rows]).mean(0), len(rows)


@pytest.mark.parametrize("background", [None, 0])
@pytest.mark.parametrize("size", [(32, 48), (24, 24)])
def test_measures_are_those_of_whole_maps(vit, size, background, monkeypatch):
    """A tile of 5 queries, so that several make a photo."""
    monkeypatch.setattr("selectivit.eval.diffuseness.ROWS_AT_ONCE", 5)
    torch.manual_seed(1)
    image, grid = torch.randn(3, *size), (size[0] // 8, size[1] // 8)
    classes = torch.randint(0, 4, grid)
    classes[classes == 3] = UNLABELLED
    mask = classes.repeat_interleave(8, 0).repeat_interleave(8, 1)
    found = diffuseness(vit, image, mask, RULES, [0, 2], background=background)
    assert found.layers == ("blocks.0.attn", "blocks.2.attn")
    for layer, place in enumerate((0, 2)):
        for i, rule in enumerate(RULES):
            from selectivit.ops.selective import attention_weights
            from selectivit.swap.maps import run_forward
            from selectivit.swap.record import recording
            from selectivit.swap.sites import find_sites

            site = find_sites(vit)[0][place]
            with torch.no_grad(), recording([site]) as calls:
                run_forward(vit, image[None], site)
            call = calls[site.name][0]
            whole = attention_weights(call.q, call.k, call.v, rule, scale=call.scale)[0].double()
            want, count = by_definition(whole, classes.flatten(), 3, background)
            assert found.queries == count
            torch.testing.assert_close(found.means()[layer, i], want, atol=1e-5, rtol=1e-4)
    parts = found.means()[:, :, :5].sum(2)
    torch.testing.assert_close(parts, torch.ones_like(parts), atol=1e-5, rtol=0)


def test_softmax_of_qk_is_the_model_s_own_attention(vit):
    image, mask = torch.randn(1, 3, 32, 32), torch.zeros(32, 32, dtype=torch.long)
    found = diffuseness(vit, image, mask, [AttentionRule("softmax")], -1)
    maps = sv.attention_maps(vit, image)[0, :, 3:]  # of the patches
    torch.testing.assert_close(found.means()[0, 0, 4], maps[..., :3].sum(-1).mean(-1).double(), atol=1e-5, rtol=1e-4)
    entropy = torch.special.entr(maps).sum(-1).exp().mean(-1)
    torch.testing.assert_close(found.means()[0, 0, 5], entropy.double(), atol=1e-3, rtol=1e-4)


def test_photos_add_up_query_by_query(vit):
    images = torch.randn(2, 3, 32, 32)
    mask = torch.randint(0, 2, (32, 32))
    few = mask.masked_fill(torch.arange(32)[:, None] > 8, UNLABELLED)
    one, two = (diffuseness(vit, image, m, RULES[:2], -1) for image, m in zip(images, (mask, few), strict=True))
    both = one + two
    assert one.queries == 16 and two.queries == 4 and both.queries == 20
    torch.testing.assert_close(both.means(), (16 * one.means() + 4 * two.means()) / 20)


@given(h=st.integers(1, 5), w=st.integers(1, 5), factor=st.sampled_from([1, 3, 16, 20]))
def test_a_patch_has_the_class_of_most_of_its_pixels(h, w, factor):
    classes = torch.randint(0, 3, (h, w))
    mask = classes.repeat_interleave(factor, 0).repeat_interleave(factor, 1)
    if factor > 3:
        mask[::factor] = UNLABELLED  # one row in each patch
    assert patch_classes(mask, (h, w)).tolist() == classes.flatten().tolist()


def test_the_model_is_left_as_it_was(vit):
    image = torch.randn(1, 3, 32, 32)
    before = vit.forward_features(image)
    diffuseness(vit, image, torch.zeros(8, 8, dtype=torch.long), RULES)
    assert torch.equal(before, vit.forward_features(image))


def test_no_text_tower_is_needed_but_attention_is(vit):
    mask = torch.full((32, 32), UNLABELLED)
    empty = diffuseness(vit, torch.randn(3, 32, 32), mask, RULES[:1])
    assert empty.queries == 0
    with pytest.raises(ValueError, match="check the masks"):
        empty.means()
    with pytest.raises(ValueError, match="no attention found"):
        diffuseness(nn.Conv2d(3, 3, 1), torch.randn(3, 32, 32), mask, RULES[:1])
    with pytest.raises(ValueError, match="out of range"):
        diffuseness(vit, torch.randn(3, 32, 32), mask, RULES[:1], [7])
