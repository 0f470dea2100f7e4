"""α and scale by the image at hand: diffuse heads are brought to the target, concentrated ones keep softmax."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from selectivit.openvocab.auto import auto_attention, choose, effective_tokens, keys_that_stand_out
from selectivit.openvocab.dense import dense_tokens
from selectivit.openvocab.presets import PRESETS, Preset
from selectivit.ops.entmax import entmax

pytest.importorskip("open_clip")
from clips import CLIPS, images


@settings(max_examples=30, deadline=None)
@given(st.integers(8, 60), st.floats(0.01, 30), st.floats(1.5, 20), st.integers(0, 99))
def test_what_is_chosen_uses_as_many_keys_as_aimed_at(keys, spread, target, seed):
    scores = spread * torch.randn(3, 12, keys, generator=torch.Generator().manual_seed(seed))
    alpha, factor = choose(scores, torch.full((3,), target))
    before = effective_tokens(scores.softmax(-1))
    after = effective_tokens(entmax(scores * factor[:, None, None], alpha[:, None, None]))
    concentrated = before <= target
    assert (alpha[concentrated] == 1).all() and (factor[concentrated] == 1).all()
    assert torch.allclose(after[concentrated], before[concentrated], rtol=1e-4)
    reachable = effective_tokens(entmax(scores * torch.tensor(4.0).exp(), 2.0)) < target
    brought = ~concentrated & reachable
    assert torch.allclose(after[brought], torch.tensor(target), rtol=0.1)
    assert (alpha >= 1).all() and (alpha <= 2).all() and (factor >= 1).all()
    assert (factor[alpha < 1.99] == 1).all()  # the scores are scaled only where the largest α does not suffice


def test_keys_that_stand_out_are_those_of_the_upper_group():
    groups = torch.cat([torch.full((7,), 3.0), torch.full((13,), -1.0)])
    scores = groups[torch.randperm(20)] + 0.3 * torch.rand(2, 5, 20)
    assert torch.equal(keys_that_stand_out(scores), torch.tensor([7.0, 7.0]))
    assert torch.equal(keys_that_stand_out(4 * scores - 9), torch.tensor([7.0, 7.0]))  # whatever the scale
    hidden = torch.cat([scores, torch.full((2, 5, 4), -torch.inf)], -1)
    assert torch.equal(keys_that_stand_out(hidden), torch.tensor([7.0, 7.0]))
    assert keys_that_stand_out(torch.zeros(3, 4)) == 1  # rows without any difference


def test_a_concentrated_head_is_softmax_bit_for_bit_in_effect():
    q = 40 * torch.randn(1, 2, 30, 16)
    v = torch.randn(1, 2, 30, 16)
    scores = q @ q.mT / 4
    assert (effective_tokens(scores.softmax(-1)) <= keys_that_stand_out(scores)).all()
    out = auto_attention(q, q, v, scale=0.25, attn_mask=None, num_prefix=1)
    softmax = torch.nn.functional.scaled_dot_product_attention(q, q, v, scale=0.25)
    assert torch.allclose(out, softmax, atol=1e-5)


def test_each_image_and_head_has_its_own_choice():
    seen = []
    q = torch.randn(2, 2, 40, 8) * torch.tensor([0.2, 30.0]).view(1, 2, 1, 1)
    q[1] *= 2
    both = auto_attention(q, q, q, scale=1.0, attn_mask=None, num_prefix=0, note=lambda *what: seen.append(what))
    alone = auto_attention(q[1:], q[1:], q[1:], scale=1.0, attn_mask=None, num_prefix=0)
    assert torch.equal(both[1:], alone)
    (first, _, before, after, target), (second, *_) = seen
    assert first[0] > 1 and first[1] == 1 and not torch.equal(first, second)
    assert before[0] > target[0] and after[0] == pytest.approx(target[0].item(), rel=0.1)


def test_masked_keys_stay_hidden():
    q, v = torch.randn(2, 2, 20, 8), torch.randn(2, 2, 20, 8)
    mask = torch.ones(2, 1, 1, 20, dtype=torch.bool)
    mask[0, ..., 15:], mask[1, ..., 10:] = False, False
    out = auto_attention(q, q, v, scale=1.0, attn_mask=mask, num_prefix=0)
    changed = v.clone()
    changed[0, :, 15:], changed[1, :, 10:] = 100.0, 100.0
    assert torch.equal(out, auto_attention(q, q, changed, scale=1.0, attn_mask=mask, num_prefix=0))


@pytest.mark.parametrize("preset", ["entmax-qk", "sclip", "naclip", "gem", "maskclip", "selectivit"])
@pytest.mark.parametrize("name", ["open_clip CLIP", "transformers SigLIP"])
def test_presets_take_it(preset, name):
    found = replace(PRESETS[preset], normalizer="entmax", alpha="auto", layers=1)
    model, x = CLIPS[name](), images(2)
    with torch.no_grad():
        both, one = dense_tokens(model, x, found).tokens, dense_tokens(model, x[1:], found).tokens
        plain = dense_tokens(model, x, replace(found, normalizer="softmax", alpha=1.0)).tokens
    assert both.isfinite().all() and torch.allclose(both[1:], one, atol=1e-5)
    assert torch.equal(both, plain) == (preset == "maskclip")


def test_joint_scores_are_chosen_together():
    preset = Preset(scores="qq+kk", normalizer="entmax", alpha="auto", combine="scores")
    model, x = CLIPS["open_clip CLIP"](), images(1)
    with torch.no_grad():
        joint, mean = (dense_tokens(model, x, replace(preset, combine=c)).tokens for c in ("scores", "mean"))
        twice = dense_tokens(model, x, replace(preset, combine="sum", scores="qq")).tokens
        once = dense_tokens(model, x, replace(preset, combine="mean", scores="qq")).tokens
    assert not torch.allclose(joint, mean) and torch.allclose(twice, once)


@pytest.mark.parametrize(("normalizer", "alpha"), [("softmax", "auto"), ("random_mask", "auto"), ("entmax", "best")])
def test_auto_goes_with_entmax_alone(normalizer, alpha):
    with pytest.raises(ValueError, match="or 'auto' with the normalizer entmax"):
        Preset(normalizer=normalizer, alpha=alpha)
