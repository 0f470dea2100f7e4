"""The shapes that the signatures of ops/ state, checked at run time by jaxtyping and beartype."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from selectivit.ops import attention, entmax, entmax_loss, reference, selective

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


def test_the_check_can_fail():
    with pytest.raises(jaxtyping.TypeCheckError):
        checked(attention.entmax_attention)(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 5), torch.zeros(1, 2, 3, 4))
