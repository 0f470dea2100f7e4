"""Calibration: the factors keep softmax's outputs, the bound holds, and what is saved is what is loaded."""

from __future__ import annotations

import copy
import json
import os

import pytest
import torch
from swap_hosts import timm_vit
from torch import nn

import selectivit as sv
from selectivit.ops.selective import AttentionRule, attention_weights
from selectivit.swap.calibrate import FACTORS
from selectivit.swap.calibration import RECORD_FILE, TENSORS_FILE
from selectivit.swap.fingerprint import fingerprint
from selectivit.swap.record import recording
from selectivit.swap.sites import find_sites


@pytest.fixture
def model():
    torch.manual_seed(0)
    vit = timm_vit(dynamic_img_size=True)
    for name, parameter in vit.named_parameters():
        if "qkv.weight" in name:  # scores wide enough for softmax to be far from uniform
            nn.init.normal_(parameter, std=0.3)
    return vit


@pytest.fixture
def images():
    return torch.randn(2, 3, 64, 96, generator=torch.Generator().manual_seed(1))


def distance(model, images, **swap):
    with torch.no_grad():
        softmax = sv.features(model, images).map
        with sv.swap_attention(model, layers=None, **swap):
            return ((sv.features(model, images).map - softmax).norm() / softmax.norm()).item()


def test_calibrated_features_are_closer_to_softmax(model, images):
    calibration = sv.calibrate_swap(model, images)
    fresh = torch.randn(2, 3, 64, 96, generator=torch.Generator().manual_seed(9))
    assert distance(model, fresh, scale=calibration) < 0.6 * distance(model, fresh)


def test_the_model_is_left_as_it_was(model, images):
    before = [type(m) for m in model.modules()], sv.features(model, images).map
    sv.calibrate_swap(model, images)
    assert [type(m) for m in model.modules()] == before[0]
    assert torch.equal(sv.features(model, images).map, before[1])


def test_factors_are_the_best_of_a_brute_force_search(model, images):
    calibration = sv.calibrate_swap(model, images[:1])
    sites, _ = find_sites(model)
    with torch.no_grad(), recording(sites) as calls:
        sv.features(model, images[:1])
    for site in sites:
        (call,) = calls[site.name]
        softmax = attention_weights(call.q, call.k, call.v, call.rule, scale=call.scale) @ call.v

        def error(factor, call=call, softmax=softmax):
            rule = AttentionRule(scale=factor)
            sparse = attention_weights(call.q, call.k, call.v, rule, scale=call.scale) @ call.v
            variance = (softmax - softmax.mean(-2, keepdim=True)).square().sum((0, 2, 3))
            return (sparse - softmax).square().sum((0, 2, 3)) / variance

        best = torch.stack([error(f) for f in torch.logspace(-1.55, 0.15, 60).tolist()]).amin(0)
        assert (error(calibration.factors[site.name]) <= 1.05 * best + 1e-3).all()


@pytest.mark.parametrize("bound", (0.12, 0.08))
def test_bound_on_the_support(model, images, bound):
    free, bounded = sv.calibrate_swap(model, images), sv.calibrate_swap(model, images, max_support=bound)
    assert bounded.mean_support() <= bound < free.mean_support()
    assert bounded.fitted_on["price_of_support"] > 0 == free.fitted_on["price_of_support"]
    sites, _ = find_sites(model)
    shares = []
    with torch.no_grad(), sv.swap_attention(model, layers=None, scale=bounded), recording(sites) as calls:
        sv.features(model, images)
    for (call,) in calls.values():
        shares.append((attention_weights(call.q, call.k, call.v, call.rule, scale=call.scale) > 0).float().mean())
    assert torch.stack(shares).mean() == pytest.approx(bound, rel=0.15)


def test_images_of_several_sizes_and_single_images(model):
    images = [torch.randn(3, 64, 64), torch.randn(2, 3, 32, 96)]
    calibration = sv.calibrate_swap(model, images, layers=-2)
    assert len(calibration.factors) == 2 and calibration.fitted_on["images"] == 3
    assert calibration.fitted_on["sizes"] == [(32, 96), (64, 64)]
    with sv.swap_attention(model, layers=-2, scale=calibration) as swap:
        assert swap.replaced == tuple(calibration.factors)


def test_self_correlation_and_other_alphas(model, images):
    calibration = sv.calibrate_swap(model, images, alpha=1.2, scores="qq+kk")
    assert calibration.alpha == 1.2 and calibration.scores == "qq+kk"
    assert all(0.5 * FACTORS[-1] < f <= FACTORS[0] for t in calibration.factors.values() for f in t.tolist())


def test_saved_and_loaded(model, images, tmp_path):
    calibration = sv.calibrate_swap(model, images)
    calibration.save(tmp_path / "new" / "folder")
    loaded = sv.Calibration.load(tmp_path / "new" / "folder")
    for name, factors in calibration.factors.items():
        assert torch.equal(loaded.factors[name], factors) and torch.equal(loaded.error[name], calibration.error[name])
    assert loaded.alpha == 1.5 and loaded.fitted_on["images"] == 2
    assert json.loads((tmp_path / "new" / "folder" / RECORD_FILE).read_text())["fitted_on"]["model"]
    assert distance(model, images, scale=loaded) == distance(model, images, scale=calibration)


def test_what_cannot_be_loaded(tmp_path):
    with pytest.raises(FileNotFoundError, match=TENSORS_FILE):
        sv.Calibration.load(tmp_path)
    (tmp_path / TENSORS_FILE).write_bytes(b"no tensors"), (tmp_path / RECORD_FILE).write_text("{}")
    with pytest.raises(ValueError, match="does not hold a calibration"):
        sv.Calibration.load(tmp_path)


def test_a_failed_write_leaves_the_old_file(model, images, tmp_path, monkeypatch):
    calibration = sv.calibrate_swap(model, images)
    calibration.save(tmp_path)
    old = (tmp_path / TENSORS_FILE).read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space"):
        sv.calibrate_swap(model, images[:1]).save(tmp_path)
    assert (tmp_path / TENSORS_FILE).read_bytes() == old and len(list(tmp_path.iterdir())) == 2


def test_bad_arguments(model, images):
    with pytest.raises(ValueError, match="alpha=1 is softmax"):
        sv.calibrate_swap(model, images, alpha=1.0)
    with pytest.raises(ValueError, match=r"share of the keys in \(0, 1\]"):
        sv.calibrate_swap(model, images, max_support=25)
    with pytest.raises(ValueError, match="NaN or infinite"):
        sv.calibrate_swap(model, images.clone().fill_(float("nan")))
    with pytest.raises(ValueError, match="at least one image"):
        sv.calibrate_swap(model, [])
    with pytest.raises(ValueError, match="the least is"):
        sv.calibrate_swap(model, images, max_support=1e-4)
    with sv.swap_attention(model), pytest.raises(ValueError, match="swapped already"):
        sv.calibrate_swap(model, images)
    with pytest.raises(ValueError, match="no attention found"):
        sv.calibrate_swap(nn.Linear(3, 3), images)


def test_a_calibration_for_another_alpha_or_source_is_refused(model, images):
    calibration = sv.calibrate_swap(model, images, alpha=1.3)
    with pytest.raises(ValueError, match=r"fitted for alpha=1\.3"):
        sv.swap_attention(model, layers=None, alpha=1.5, scale=calibration)
    with pytest.raises(ValueError, match="fitted for scores='qk'"):
        sv.swap_attention(model, layers=None, alpha=1.3, scores="qq", scale=calibration)


@pytest.mark.parametrize("normalizer", ("softmax", "sparsemax", "random_mask"))
def test_a_calibration_for_another_normalizer_is_refused(model, images, normalizer):
    calibration = sv.calibrate_swap(model, images)
    with pytest.raises(ValueError, match=rf"fitted for alpha=1\.5 of entmax.*asks for {normalizer}"):
        sv.swap_attention(model, normalizer, layers=None, scale=calibration)
    with pytest.raises(ValueError, match=r"asks for alpha=tensor"):
        sv.swap_attention(model, alpha=torch.tensor([1.5, 1.6]), layers=None, scale=calibration)
    with sv.swap_attention(model, alpha=torch.tensor([1.5, 1.5]), layers=None, scale=calibration):
        pass


def test_a_calibration_for_alpha_2_is_one_for_sparsemax(model, images):
    calibration = sv.calibrate_swap(model, images, alpha=2.0)
    for normalizer, alpha in (("sparsemax", 1.5), ("entmax", 2.0)):
        with sv.swap_attention(model, normalizer, alpha, layers=None, scale=calibration) as swap:
            assert len(swap.replaced) == 3


def test_a_calibration_of_other_weights_is_refused(model, images):
    calibration = sv.calibrate_swap(model, images)
    for name in ("blocks.0.attn.proj", "blocks.2.attn.proj"):
        other = copy.deepcopy(model)
        with torch.no_grad():
            other.get_submodule(name).weight[3, 4] += 1e-3
        with pytest.raises(
            ValueError, match=r"fitted for VisionTransformer \(3 attention layers, width 32.* this model"
        ):
            sv.swap_attention(other, layers=None, scale=calibration)
    deeper = timm_vit(depth=4)
    with pytest.raises(ValueError, match="4 attention layers"):
        sv.swap_attention(deeper, layers=[0], scale=calibration)


@pytest.mark.parametrize("dtype", (torch.float64, torch.float16, torch.bfloat16))
def test_a_calibration_serves_the_same_model_in_another_dtype(model, images, dtype):
    calibration = sv.calibrate_swap(model, images)
    with sv.swap_attention(copy.deepcopy(model).to(dtype), layers=None, scale=calibration):
        pass
    torch.manual_seed(5)
    with pytest.raises(ValueError, match="fitted for"):
        sv.swap_attention(timm_vit().to(dtype), layers=None, scale=calibration)


def test_the_fingerprint_does_not_see_a_swap(model):
    before = fingerprint(model, find_sites(model)[0])
    with sv.swap_attention(model, layers=None):
        assert fingerprint(model, find_sites(model)[0]) == before
    assert json.loads(json.dumps(before)) == before


def test_two_saves_that_a_crash_mixed_are_told(model, images, tmp_path, monkeypatch):
    sv.calibrate_swap(model, images).save(tmp_path)
    replace, done = os.replace, []

    def crash(source, target):
        if done:
            raise OSError(5, "the power went")
        done.append(target)
        replace(source, target)

    monkeypatch.setattr("os.replace", crash)
    with pytest.raises(OSError, match="the power went"):
        sv.calibrate_swap(model, images[:1], alpha=1.3).save(tmp_path)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="not of one calibration"):
        sv.Calibration.load(tmp_path)
    sv.calibrate_swap(model, images[:1], alpha=1.3).save(tmp_path)
    assert sv.Calibration.load(tmp_path).alpha == 1.3


def test_a_record_changed_by_hand_is_told(model, images, tmp_path):
    sv.calibrate_swap(model, images).save(tmp_path)
    text = (tmp_path / RECORD_FILE).read_text()
    (tmp_path / RECORD_FILE).write_text(text.replace('"alpha": 1.5', '"alpha": 1.4'))
    with pytest.raises(ValueError, match="not of one calibration"):
        sv.Calibration.load(tmp_path)
