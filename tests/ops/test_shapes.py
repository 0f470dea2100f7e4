"""The shapes that the signatures of ops/ state, checked at run time by jaxtyping and beartype."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from selectivit.layers.block import CoreBlock
from selectivit.layers.core_attention import CoreAttention
from selectivit.ops import attention, core_attention, entmax, entmax_loss, products, reference, rope, selective

jaxtyping = pytest.importorskip("jaxtyping")
beartype = pytest.importorskip("beartype")


def checked(function):
    return jaxtyping.jaxtyped(typechecker=beartype.beartype)(function)


@given(shape=st.lists(st.integers(1, 4), min_size=1, max_size=4), dim=st.integers(0, 3))
def test_entmax_shapes(shape, dim):
    x = torch.randn(shape)
    checked(entmax.entmax)(x, 1.5, dim % len(shape))
    checked(entmax.entmax15)(x)
    checked(entmax.sparsemax)(x)
    checked(reference.entmax_reference)(x, 1.5)
    checked(entmax_loss.entmax_loss)(x, torch.zeros(shape[:-1], dtype=torch.int64), reduction="none")


@given(lead=st.lists(st.integers(1, 3), min_size=1, max_size=3), n=st.integers(1, 5), m=st.integers(1, 5))
def test_attention_shapes(lead, n, m):
    q, k, v = torch.randn(*lead, n, 4), torch.randn(*lead, m, 4), torch.randn(*lead, m, 3)
    checked(attention.entmax_attention)(q, k, v)
    checked(selective.selective_attention)(q, k, v, selective.SOFTMAX)
    checked(selective.attention_weights)(q, k, v, selective.AttentionRule())


@given(lead=st.lists(st.integers(1, 3), min_size=1, max_size=3), c=st.integers(1, 5), n=st.integers(0, 5))
def test_core_attention_shapes(lead, c, n):
    q, k, v = torch.randn(*lead, c + n, 4), torch.randn(*lead, c + n, 4), torch.randn(*lead, c + n, 3)
    checked(core_attention.core_attention)(q, k, v, c)
    checked(core_attention.core_weights)(q, k, c)


@given(b=st.integers(1, 3), h=st.integers(1, 3), w=st.integers(1, 4), heads=st.integers(1, 3))
def test_rotary_and_layer_shapes(b, h, w, heads):
    patches = checked(rope.patch_rotations)((h, w), 8, torch.device("cpu"))
    cores = checked(rope.axial_rotations)(torch.rand(b, 2, 2), 8)
    checked(rope.moved_coordinates)(checked(rope.patch_coordinates)((h, w)), 0.1, 2.0)
    for turn in (rope.rotate, rope.rotate_):
        checked(turn)(torch.randn(b, h * w, heads, 8), patches)
        checked(turn)(torch.randn(b, 2, heads, 8), cores)
    x, weight, bias = torch.randn(b, h, 5), torch.randn(4, 5), torch.randn(4)
    checked(products.product)(x, weight, bias, torch.randn(b, h, 4))
    checked(products.gated_product)(x, weight, bias)
    block = CoreBlock(8 * heads, heads, 12)
    for method in (CoreBlock.forward, CoreBlock.core_map):
        checked(method)(block, torch.randn(b, 2 + h * w, 8 * heads), cores, patches)
    for method in (CoreAttention.forward, CoreAttention.core_map):
        checked(method)(block.attn, torch.randn(b, 2 + h * w, 8 * heads), cores, patches)


def test_the_check_can_fail():
    with pytest.raises(jaxtyping.TypeCheckError):
        checked(attention.entmax_attention)(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 5), torch.zeros(1, 2, 3, 4))
