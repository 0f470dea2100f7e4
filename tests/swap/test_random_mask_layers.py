"""The random mask as a control: every layer of a swapped model draws its own, whichever others are swapped."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from selectivit.swap.maps import attention_maps
from selectivit.swap.swap import swap_attention


@pytest.fixture
def model():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


def test_two_layers_share_no_more_than_chance(model):
    tokens = torch.randn(2, 60, 16, generator=torch.Generator().manual_seed(1))
    with swap_attention(model, "random_mask", layers=None):
        first, last = (attention_maps(model, tokens, layer) > 0 for layer in (0, 1))
        some = attention_maps(model, tokens, -1, heads=[1], queries=[7, 2]) > 0
    assert torch.equal(some, last[:, [1]][:, :, [7, 2]])
    chance = (first.sum(-1) * last.float().mean(-1)).sum() / first.sum()
    found = (first & last).sum() / first.sum()
    assert chance < 0.9 and abs(found - chance) < 0.03


def test_a_layer_is_numbered_by_its_place_in_the_model(model):
    with swap_attention(model, "random_mask", layers=None) as both:
        numbers = [site.module._selective.rule.layer for site in both.sites]
    with swap_attention(model, "random_mask") as last:
        assert [site.module._selective.rule.layer for site in last.sites] == numbers[-1:] == [1]
