"""DINO's ViT: its variants, its folders, the authors' checkpoints, and all that looks into a model."""

from __future__ import annotations

import argparse
import copy
import math

import pytest
import timm
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import selectivit as sv
from selectivit.layers.drop_path import DropPath
from selectivit.layers.selective_attention import SelectiveAttention
from selectivit.layers.specialization import Specialized
from selectivit.models.cache import WeightsError
from selectivit.models.dino_vit import DinoViT, resized_positions
from selectivit.models.dino_vit_config import DinoVitConfig

SMALL = {"dim": 32, "depth": 3, "num_heads": 2, "patch_size": 8, "image_size": 32}
VARIANTS = {
    "softmax": {},
    "registers": {"registers": 4},
    "specialization": {"specialization": 2},
    "entmax15": {"attention": "entmax15"},
    "all": {"attention": 1.3, "registers": 2, "specialization": "third", "layer_scale": 0.5, "drop_path": 0.2},
}


def make(seed=0, sharp=2.0, **arguments):
    torch.manual_seed(seed)
    model = DinoViT(DinoVitConfig(**{**SMALL, **arguments}))
    for name, parameter in model.named_parameters():  # random attention is nearly uniform: sharpen it
        if "qkv" in name:
            parameter.data.mul_(sharp * 8)
    return model.eval()


@pytest.fixture(params=VARIANTS)
def variant(request):
    return make(**VARIANTS[request.param])


def test_every_variant_gives_tokens_of_any_size_and_gradients_everywhere(variant):
    images = torch.randn(2, 3, 48, 32)
    found = sv.features(variant, images)
    assert found.map.shape == (2, 32, 6, 4) and found.cls.shape == (2, 32)
    registers = variant.config.registers
    assert found.registers is None if not registers else found.registers.shape == (2, registers, 32)
    torch.testing.assert_close(variant(images), found.cls)
    variant.train()
    (variant.forward_features(images) * torch.randn(32)).sum().backward()
    for name, parameter in variant.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_every_variant_comes_back_from_its_folder(variant, tmp_path):
    images = torch.randn(1, 3, 40, 56)
    variant.save_pretrained(tmp_path)
    again = sv.load_model(tmp_path)
    assert isinstance(again, DinoViT) and again.config == variant.config and not again.training
    assert torch.equal(again(images), variant(images))


def test_maps_and_swaps_see_the_rule_that_a_model_was_made_with(variant):
    images, sparse = torch.randn(1, 3, 32, 32), variant.config.attention != "softmax"
    before = variant(images)
    maps = sv.attention_maps(variant, images, layer=1)
    torch.testing.assert_close(maps.sum(-1), torch.ones_like(maps[..., 0]))
    assert bool((maps == 0).any()) == sparse
    with sv.swap_attention(variant, "softmax", layers=None) as swap:
        assert len(swap.replaced) == 3 and not swap.skipped
        dense = sv.attention_maps(variant, images, layer=1)
        assert not (dense == 0).any()
        assert torch.allclose(variant(images), before, atol=1e-5) != sparse
    assert torch.equal(variant(images), before)
    with sv.swap_attention(variant, "sparsemax", layers=-1):
        assert (sv.attention_maps(variant, images) == 0).any()
        assert not torch.allclose(variant(images), before, atol=1e-5)
    assert torch.equal(variant(images), before)


def test_a_swap_to_the_models_own_rule_changes_nothing():
    model, images = make(attention="entmax15"), torch.randn(2, 3, 32, 32)
    wanted = model(images)
    with sv.swap_attention(model, "entmax", 1.5, layers=None):
        torch.testing.assert_close(model(images), wanted)


def test_a_softmax_model_swapped_is_the_entmax_model_of_the_same_weights():
    dense, sparse, images = make(), make(attention="entmax15"), torch.randn(2, 3, 32, 32)
    assert dense.state_dict().keys() == sparse.state_dict().keys()
    with sv.swap_attention(dense, "entmax", 1.5, layers=None):
        torch.testing.assert_close(dense(images), sparse(images))
    assert not torch.allclose(dense(images), sparse(images), atol=1e-3)


def test_a_model_without_softmax_cannot_be_calibrated_to_it():
    with pytest.raises(ValueError, match="made with entmax"):
        sv.calibrate_swap(make(attention="entmax15"), torch.randn(1, 3, 32, 32))


def test_variants_of_one_seed_start_as_one_model():
    images = torch.randn(1, 3, 32, 32)
    plain, special = make(), make(specialization="half")
    assert len([m for m in special.modules() if isinstance(m, Specialized)]) == 2 * 5
    torch.testing.assert_close(special(images), plain(images))


@pytest.mark.parametrize("layer", ["norm1", "norm2", "attn.qkv", "ls1", "ls2"])
def test_class_token_and_patches_really_use_other_weights(layer):
    """Alter one half of one layer of the last specialized block: only its tokens leave the layer otherwise."""
    model, tokens = make(specialization=1), torch.randn(2, 5, 32)
    special = model.blocks[0].get_submodule(layer)
    before = special(tokens)
    for half, moved in (("cls", slice(0, 1)), ("patches", slice(1, None))):
        altered = copy.deepcopy(special)
        for parameter in getattr(altered, half).parameters():
            parameter.data.add_(0.5)
        change = (altered(tokens) - before).abs().amax(-1)
        still = torch.ones(5, dtype=torch.bool)
        still[moved] = False
        assert (change[:, still] == 0).all() and (change[:, ~still] > 0).all()


def test_specialization_costs_what_the_paper_says():
    count = {
        depth: sum(p.numel() for p in sv.create_model("dino_vit_small_patch16", specialization=depth).parameters())
        for depth in ("none", "third")
    }
    assert count["none"] == 21_665_664  # DINO's ViT-S/16
    assert 1.08 < count["third"] / count["none"] < 1.09


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"image_size": 36}, "whole patches of 8 px, got 36: 32 is one"),
        ({"attention": "entmax"}, "unknown normalizer 'entmax'"),
        ({"attention": 0.5}, "alpha"),
        ({"specialization": "quarter"}, "third, half, got 'quarter'"),
        ({"specialization": 4}, "up to 3 blocks"),
        ({"registers": -1}, "registers of at least 0"),
        ({"num_heads": 5}, "divides dim 32"),
        ({"layer_scale": 0.0}, "layer_scale above 0"),
        ({"drop_path": 1.0}, "drop_path"),
    ],
)
def test_shapes_that_cannot_be(wrong, told):
    with pytest.raises(ValueError, match=told):
        DinoVitConfig(**{**SMALL, **wrong})


def test_names_and_arguments_that_are_unknown():
    with pytest.raises(ValueError, match=r"did you mean .*dino_vit_small_patch16"):
        sv.create_model("dino_vit_smal_patch16")
    with pytest.raises(TypeError, match="unknown argument 'register': DINO's ViT takes dim, depth"):
        sv.create_model("dino_vit_tiny_patch16", register=4)
    with pytest.raises(TypeError, match="registers as a whole number"):
        sv.create_model("dino_vit_tiny_patch16", registers=4.5)


def authors_positions(table, width, height, patch, dim):
    """`interpolate_pos_encoding` of DINO's public code."""
    count = table.shape[1] - 1
    if count == (width // patch) * (height // patch) and width == height:
        return table
    w0, h0 = width // patch + 0.1, height // patch + 0.1
    side = int(math.sqrt(count))
    patches = nn.functional.interpolate(
        table[:, 1:].reshape(1, side, side, dim).permute(0, 3, 1, 2),
        scale_factor=(w0 / math.sqrt(count), h0 / math.sqrt(count)),
        mode="bicubic",
    )
    assert int(w0) == patches.shape[-2] and int(h0) == patches.shape[-1]
    return torch.cat((table[:, :1], patches.permute(0, 2, 3, 1).reshape(1, -1, dim)), dim=1)


@given(st.integers(1, 12), st.integers(1, 12), st.sampled_from([2, 7, 14]))
def test_positions_are_resized_as_the_authors_do(height, width, side):
    table = torch.randn(1, 1 + side**2, 4, generator=torch.Generator().manual_seed(height * 13 + width))
    found = resized_positions(table, (side, side), (height, width), 1)
    torch.testing.assert_close(found, authors_positions(table, 8 * height, 8 * width, 8, 4), atol=1e-5, rtol=1e-4)


def test_it_is_the_authors_model_at_the_size_of_its_table():
    """timm's own DINO has the same tensors and gives the same tokens."""
    torch.manual_seed(0)
    theirs = timm.create_model("vit_small_patch16_224.dino", pretrained=False, num_classes=0).eval()
    ours = DinoViT.from_official(theirs.state_dict())
    assert ours.config == DinoVitConfig()
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        torch.testing.assert_close(ours.forward_features(images), theirs.forward_features(images))


@pytest.fixture
def official():
    """What the authors' training writes: both models with heads, the options of its command line."""
    teacher, student = (make(seed).state_dict() for seed in (1, 2))
    head = {"head.mlp.0.weight": torch.zeros(2, 2), "head.last_layer.weight_g": torch.ones(2, 1)}
    return {
        "teacher": {f"backbone.{name}": t for name, t in teacher.items()} | head,
        "student": {f"module.backbone.{name}": t for name, t in student.items()}
        | {f"module.{n}": t for n, t in head.items()},
        "epoch": 100,
        "args": argparse.Namespace(arch="vit_small", lr=5e-4),
    }


def test_official_training_checkpoints_load(official, tmp_path):
    torch.save(official, tmp_path / "checkpoint.pth")
    images = torch.randn(1, 3, 32, 32)
    for which, seed in (("teacher", 1), ("student", 2)):
        model = DinoViT.from_official(tmp_path / "checkpoint.pth", which=which, num_heads=2)
        assert torch.equal(model(images), make(seed)(images)) and not model.training
    sparse = DinoViT.from_official(tmp_path / "checkpoint.pth", num_heads=2, attention="entmax15")
    assert torch.equal(sparse(images), make(1, attention="entmax15")(images))


def test_official_positions_are_brought_to_another_size(official):
    model = DinoViT.from_official(official, num_heads=2, image_size=48)
    assert model.config.image_size == 48 and model.pos_embed.shape == (1, 37, 32)
    images = torch.randn(1, 3, 48, 48)
    torch.testing.assert_close(model(images), make(1)(images))


def test_official_checkpoints_that_are_none(official, tmp_path):
    class Evil:
        def __reduce__(self):
            return print, ("run",)

    torch.save({"teacher": Evil()}, tmp_path / "evil.pth")
    with pytest.raises(WeightsError, match="more than plain tensors"):
        DinoViT.from_official(tmp_path / "evil.pth")
    (tmp_path / "cut.pth").write_bytes(b"PK\x03\x04")
    with pytest.raises(WeightsError, match=r"cut.pth"):
        DinoViT.from_official(tmp_path / "cut.pth")
    with pytest.raises(WeightsError, match="no file"):
        DinoViT.from_official(tmp_path / "none.pth")
    with pytest.raises(ValueError, match=r"does not have \(layer1.weight\)"):
        DinoViT.from_official({"layer1.weight": torch.ones(2)})
    with pytest.raises(ValueError, match="give num_heads"):
        DinoViT.from_official(official)
    with pytest.raises(ValueError, match="which to be one of teacher, student"):
        DinoViT.from_official(official, which="best")
    del official["teacher"]["backbone.norm.bias"]
    with pytest.raises(WeightsError, match=r"1 missing \(norm.bias\)"):
        DinoViT.from_official(official, num_heads=2)


def test_a_folder_of_another_kind_is_refused(tmp_path):
    sv.create_model("veca_tiny_patch16", dim=32, depth=1, num_heads=2, hidden_dim=8).save_pretrained(tmp_path)
    with pytest.raises(WeightsError, match="expected a dino_vit model"):
        DinoViT.from_pretrained(tmp_path)


def test_stochastic_depth_leaves_out_whole_images_and_only_in_training():
    layer, x = DropPath(0.4), torch.ones(1000, 2, 3)
    assert torch.equal(layer.eval()(x), x)
    torch.manual_seed(0)
    found = layer.train()(x)[:, 0, 0]
    assert 0.3 < (found == 0).float().mean() < 0.5 and found.max() == pytest.approx(1 / 0.6)
    drops = [m for m in make(drop_path=0.2).modules() if isinstance(m, DropPath)]
    assert [round(m.chance, 3) for m in drops] == [0.0, 0.0, 0.1, 0.1, 0.2, 0.2]


def test_the_layer_is_plain_attention_under_its_rule():
    torch.manual_seed(0)
    layer, x = SelectiveAttention(16, 2, "entmax15"), torch.randn(2, 7, 16)
    q, k, v = layer.qkv(x * 3).reshape(2, 7, 3, 2, 8).permute(2, 0, 3, 1, 4)
    wanted = sv.entmax(q @ k.transpose(-1, -2) / 8**0.5, 1.5) @ v
    torch.testing.assert_close(layer(x * 3), layer.proj(wanted.transpose(1, 2).reshape(2, 7, 16)))
    with pytest.raises(ValueError, match="is_causal"):
        layer(x, is_causal=True)
    with pytest.raises(ValueError, match="divides dim 16"):
        SelectiveAttention(16, 3)
    mask = torch.ones(7, 7, dtype=torch.bool)
    mask[:, 3] = False
    x2 = x.clone()
    x2[:, 3] += 1
    keep = [0, 1, 2, 4, 5, 6]
    torch.testing.assert_close(layer(x, attn_mask=mask)[:, keep], layer(x2, attn_mask=mask)[:, keep])
