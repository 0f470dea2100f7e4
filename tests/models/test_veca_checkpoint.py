"""VECA on disk: our folder, the public code's checkpoints, and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import selectivit as sv
from selectivit.models import checkpoint
from selectivit.models.cache import WeightsError
from selectivit.models.veca import Veca, VecaConfig

SHARED = Path(__file__).parents[3] / "shared"
RECORDED = Path(os.environ.get("SELECTIVIT_SHARED", SHARED)) / "oracles" / "veca_square.safetensors"
SMALL = VecaConfig(
    dim=32, depth=2, num_heads=2, hidden_dim=40, num_cores=16, patch_size=8, out_dim=6, attention="entmax15"
)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Veca(SMALL).eval()


@pytest.fixture
def folder(model, tmp_path):
    model.save_pretrained(tmp_path / "veca")
    return tmp_path / "veca"


def images(seed=1):
    return torch.randn(2, 3, 32, 48, generator=torch.Generator().manual_seed(seed))


def as_published(model):
    """A state dict under the public code's names."""
    state, dim = {}, model.config.dim
    for name, tensor in model.state_dict().items():
        if ".qkv." in name:
            for part, rows in zip("qkv", tensor.split(dim), strict=True):
                state[name.replace("qkv", f"{part}_proj")] = rows.clone()
            continue
        for ours, theirs in (
            ("patch_embed.", "patch_embed.proj."),
            ("bank.token_chunks", "query_token_chunks"),
            ("bank.coord_chunks", "qcoord_chunks"),
            ("bank.coord_heads", "pos_linears"),
            ("bank.coord_steps", "pos_alpha"),
            (".attn.proj.", ".attn.out_proj."),
            (".ffn.", "."),
        ):
            name = name.replace(ours, theirs)
        name = f"final_{name}" if name.startswith("norm.") else name
        state[name] = tensor[None].clone() if "_chunks" in name else tensor.clone()
    return state


# --- the public code's recorded outputs --------------------------------------------------------------------------


@pytest.mark.skipif(not RECORDED.is_file(), reason="the recorded outputs are not on this machine")
@pytest.mark.parametrize("grad", [False, True])
def test_recorded_outputs_of_the_public_code(grad):
    held = load_file(RECORDED)
    state = {name.removeprefix("weights."): t for name, t in held.items() if name.startswith("weights.")}
    model = Veca.from_official(state, num_heads=2)
    for budget in (8, 16):
        with torch.set_grad_enabled(grad):
            out = model(held["image"], num_cores=budget)
        torch.testing.assert_close(out.cls, held[f"global_{budget}"], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(out.patch_tokens, held[f"patches_{budget}"], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", ["state dict", "safetensors", "pt", "training checkpoint", "data parallel"])
@torch.no_grad()
def test_public_names_come_back_as_they_were(model, tmp_path, form):
    state = as_published(model)
    source = state
    if form == "safetensors":
        save_file(state, source := tmp_path / "veca.safetensors")
    elif form in ("pt", "training checkpoint"):
        torch.save(state if form == "pt" else {"model": state, "step": 3}, source := tmp_path / "veca.pt")
    elif form == "data parallel":
        source = {f"module.{name}": tensor for name, tensor in state.items()}
    loaded = Veca.from_official(source, num_heads=2)
    assert not loaded.training and loaded.config.out_dim == 6 and loaded.config.num_cores == 16
    assert [len(chunk) for chunk in loaded.bank.token_chunks] == [8, 8]
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_public_checkpoints_that_do_not_fit(model, tmp_path):
    state = as_published(model)

    def refused(error, text, without=(), num_heads=2, **more):
        changed = {name: tensor for name, tensor in state.items() if name not in without} | more
        with pytest.raises(error, match=text):
            Veca.from_official(changed, num_heads=num_heads)

    refused(ValueError, "heads 64 wide, which do not divide dim 32: give num_heads", num_heads=None)
    refused(ValueError, r"got 1 that it does not have \(head.weight\)", **{"head.weight": torch.zeros(2)})
    refused(ValueError, "lacks what we call patch_embed.weight", without=("patch_embed.proj.weight",))
    refused(
        ValueError, "q_proj, k_proj and v_proj with weight and bias in block 1", without=("blocks.1.attn.k_proj.bias",)
    )
    refused(WeightsError, r"1 missing \(blocks.0.norm_ffn.bias\)", without=("blocks.0.norm_ffn.bias",))
    refused(WeightsError, r"coord_steps \(5,\) in place of \(1,\)", pos_alpha=torch.zeros(5))
    refused(ValueError, "is this a checkpoint of VECA", without=state, **{"blocks.0.mlp.fc3.weight": torch.zeros(1)})
    refused(ValueError, "it lacks what we call", without=state)
    refused(ValueError, r"patch_embed.weight with 4 dims, got \(4,\)", **{"patch_embed.proj.weight": torch.zeros(4)})
    with pytest.raises(ValueError, match=r"does not have \(1\): is this"):
        Veca.from_official({1: torch.zeros(2)})
    with pytest.raises(WeightsError, match=r"none.pt is no file"):
        Veca.from_official(tmp_path / "none.pt")
    with pytest.raises(WeightsError, match="is a folder, expected a file"):
        Veca.from_official(tmp_path)
    for held in (torch.ones(3), [1, 2]):
        torch.save(held, tmp_path / "other.pt")
        with pytest.raises(
            WeightsError, match=f"expected a state dict in .*other.pt, it holds a {type(held).__name__}"
        ):
            Veca.from_official(tmp_path / "other.pt")
    (tmp_path / "empty.pt").touch()
    with pytest.raises(WeightsError, match=r"damaged or of another format \(EOFError"):
        Veca.from_official(tmp_path / "empty.pt")
    (tmp_path / "damaged.safetensors").write_bytes(b"no tensors")
    with pytest.raises(WeightsError, match="cannot read"):
        Veca.from_official(tmp_path / "damaged.safetensors")


class Harmful:
    def __reduce__(self):
        return (os.system, ("false",))


def test_pickles_of_more_than_tensors_are_not_run(tmp_path):
    torch.save({"model": Harmful()}, tmp_path / "veca.pt")
    with pytest.raises(WeightsError, match="could run code"):
        Veca.from_official(tmp_path / "veca.pt")


# --- our own folder ----------------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_saved_model_comes_back_as_it_was(model, folder):
    loaded = Veca.from_pretrained(folder)
    assert loaded.config == model.config and not loaded.training
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    assert torch.equal(loaded(images(), 5).patch_tokens, model(images(), 5).patch_tokens)
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors"]
    ours = sv.load_model(folder)
    assert torch.equal(sv.features(ours, images()).map, sv.features(model, images()).map)


def test_the_dtype_is_kept_and_load_model_gives_float32(model, tmp_path):
    model.bfloat16().save_pretrained(tmp_path)
    assert {p.dtype for p in Veca.from_pretrained(tmp_path).parameters()} == {torch.bfloat16}
    assert {p.dtype for p in sv.load_model(tmp_path).parameters()} == {torch.float32}


def test_saving_again_replaces_and_a_loaded_model_stays(model, folder):
    first = Veca.from_pretrained(folder)
    kept = first.norm.weight.clone()
    torch.nn.init.zeros_(model.norm.weight)
    model.save_pretrained(folder)
    assert torch.equal(first.norm.weight, kept)
    assert Veca.from_pretrained(folder).norm.weight.abs().max() == 0


def test_a_failed_save_leaves_the_old_checkpoint(model, folder, monkeypatch):
    before = {file.name: file.read_bytes() for file in folder.iterdir()}

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        model.save_pretrained(folder)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def test_files_of_two_checkpoints_are_told_apart(folder, tmp_path, monkeypatch):
    other = tmp_path / "other"
    Veca(VecaConfig(**{**SMALL.__dict__, "num_heads": 4})).save_pretrained(other)  # the same shapes of tensors
    (folder / "config.json").write_bytes((other / "config.json").read_bytes())
    with pytest.raises(WeightsError, match="belong to different checkpoints"):
        Veca.from_pretrained(folder)


def test_a_checkpoint_of_another_size(folder):
    config = json.loads((folder / "config.json").read_text())
    state = load_file(folder / "model.safetensors")
    save_file(state, folder / "model.safetensors")  # without the configuration, as another tool would write it
    Veca.from_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({**config, "depth": 3, "dim": 64}))
    with pytest.raises(WeightsError, match=r"do not fit Veca: \d+ missing .*; \d+ of another shape"):
        Veca.from_pretrained(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no JSON"),
        ("[]", "expected an object"),
        ('{"library": "selectivit", "model": "other"}', "expected a veca model of selectivit"),
        ('{"model": "veca"}', "expected a veca model of selectivit"),
    ],
)
def test_configurations_of_others(folder, text, message):
    (folder / "config.json").write_text(text)
    with pytest.raises(WeightsError, match=message):
        Veca.from_pretrained(folder)


def test_missing_and_damaged_files(folder, tmp_path):
    with pytest.raises(WeightsError, match=r"expected a folder with config.json and model.safetensors"):
        Veca.from_pretrained(tmp_path / "none")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(WeightsError, match="is damaged"):
        Veca.from_pretrained(folder)
    weights.unlink()
    with pytest.raises(WeightsError, match=r"expected model.safetensors beside config.json"):
        Veca.from_pretrained(folder)


def test_load_model_says_what_it_does_not_know(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model": "veca9"}))
    with pytest.raises(WeightsError, match=r"cannot load .*asks for a model 'veca9', this version knows veca"):
        sv.load_model(folder)
    (folder / "config.json").write_text(json.dumps({**config, "colour": "red"}))
    with pytest.raises(WeightsError, match="different checkpoints"):
        sv.load_model(folder)
    assert checkpoint.LIBRARY == "selectivit"
