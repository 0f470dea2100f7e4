"""Which parameters Muon steps, which AdamW; and that both are the host's own rules."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_runs import make_student, make_teacher
from torch import nn

from selectivit.train.optimizers import MuonAdamW, gradients_finite, split_parameters


def named_kinds(model):
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {kind: {names[id(p)] for p in found} for kind, found in split_parameters(model).items()}


def test_a_core_periphery_student_is_split_as_the_paper_says():
    kinds = named_kinds(make_student())
    blocks = {f"blocks.{i}.{name}.weight" for i in (0, 1) for name in ("attn.qkv", "attn.proj", "ffn.fc1", "ffn.fc2")}
    assert kinds["matrices"] == blocks
    assert kinds["decayed"] == {"patch_embed.weight", "output_proj.weight"}
    assert {"bank.token_chunks.0", "bank.coord_chunks.0", "bank.coord_heads.0.weight", "bank.coord_steps"} <= kinds[
        "plain"
    ]
    assert sum(map(len, kinds.values())) == len(list(make_student().parameters()))


def test_other_hosts_blocks_are_found():
    import torchvision

    kinds = named_kinds(torchvision.models.VisionTransformer(32, 16, 1, 2, 24, 32))
    assert "encoder.layers.encoder_layer_0.self_attention.in_proj_weight" in kinds["matrices"]
    assert "class_token" in kinds["plain"] and "conv_proj.weight" in kinds["decayed"]
    assert "blocks.1.attn.qkv.weight" in named_kinds(make_teacher())["matrices"]


def stepped(model, optimizers, steps=3):
    for step in range(steps):
        torch.manual_seed(step)
        images = torch.randn(2, 3, 28, 28)
        out = model(images)
        (out.projected_patches.square().mean() + out.projected_cls.sum()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return model


def test_it_is_muon_and_adamw():
    student = make_student().eval()
    twin = copy.deepcopy(student)
    ours = stepped(student, [MuonAdamW(student, 1e-3, 0.1)])
    kinds = split_parameters(twin)
    muon = torch.optim.Muon(kinds["matrices"], lr=1e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    decayed = torch.optim.AdamW(kinds["decayed"], lr=1e-3, weight_decay=0.1, fused=True)
    plain = torch.optim.AdamW(kinds["plain"], lr=1e-3, weight_decay=0.0, fused=True)
    theirs = stepped(twin, [muon, decayed, plain])
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("muon", [True, False])
def test_its_state_can_be_saved_and_loaded(muon, tmp_path):
    whole = make_student().eval()
    stepped(whole, [MuonAdamW(whole, 1e-3, muon=muon)], steps=2)
    broken = make_student().eval()
    optimizer = MuonAdamW(broken, 1e-3, muon=muon)
    stepped(broken, [optimizer], steps=2)
    torch.save(optimizer.state_dict(), tmp_path / "state")
    fresh = MuonAdamW(broken, 7.0, muon=muon)
    fresh.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    assert {group["lr"] for group in fresh.param_groups} == {1e-3}
    for group in fresh.param_groups:  # what is set here must reach both rules
        group["lr"] = 5e-4
    for group in optimizer.param_groups:
        group["lr"] = 5e-4
    twin = copy.deepcopy(broken)
    stepped(broken, [fresh], steps=1)
    other = MuonAdamW(twin, 5e-4, muon=muon)
    other.load_state_dict(optimizer.state_dict())
    stepped(twin, [other], steps=1)
    assert all(torch.equal(a, b) for a, b in zip(broken.parameters(), twin.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(broken.parameters(), whole.parameters(), strict=True))


def test_frozen_parameters_are_left_out_and_none_is_an_error():
    model = make_student()
    model.blocks.requires_grad_(False)
    assert not split_parameters(model)["matrices"]
    MuonAdamW(model, 1e-3)
    with pytest.raises(ValueError, match="none to train"):
        MuonAdamW(nn.Linear(2, 2).requires_grad_(False), 1e-3)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_gradients_that_are_not_finite_are_seen(value):
    layer = nn.Linear(3, 2)
    layer.weight.grad = torch.ones(2, 3)
    assert gradients_finite(layer.parameters())[0]
    layer.weight.grad[1, 2] = value
    assert not gradients_finite(layer.parameters())[0]
