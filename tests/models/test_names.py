import pytest
import timm
import torch

from selectivit.models.names import EMBEDDED, ENTRIES, FORMS, parse_name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dinov2-small", ("dinov2-small", "dinov2-small")),
        ("vit_base_patch16_224.augreg_in21k", ("timm", "vit_base_patch16_224.augreg_in21k")),
        ("timm:vit_tiny_patch16_224", ("timm", "vit_tiny_patch16_224")),
        ("timm/vit_tiny_patch16_224.augreg_in21k", ("timm", "hf-hub:timm/vit_tiny_patch16_224.augreg_in21k")),
        ("facebook/dinov2-small", ("transformers", "facebook/dinov2-small")),
        ("transformers:dinov2-small", ("transformers", "dinov2-small")),
        ("open_clip:ViT-B-16/openai", ("open_clip", "ViT-B-16/openai")),
        ("open_clip:hf-hub:org/name", ("open_clip", "hf-hub:org/name")),
    ],
)
def test_the_form_of_a_name_decides_its_source(name, expected):
    assert parse_name(name) == expected


def test_a_folder_that_exists_wins(tmp_path, monkeypatch):
    (tmp_path / "facebook" / "dinov2-small").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parse_name("facebook/dinov2-small") == ("folder", "facebook/dinov2-small")
    assert parse_name("transformers:facebook/dinov2-small")[0] == "transformers"
    assert parse_name("~/facebook") == ("folder", str(tmp_path / "facebook"))
    assert parse_name("facebook/") == ("folder", "facebook")


@pytest.mark.parametrize("name", ["./none", "/none/at/all", "~/none", "a/b/c", "none/", "..\\none", "C:\\none"])
def test_a_path_without_a_folder_is_told_as_such(name):
    with pytest.raises(ValueError, match="there is no folder") as error:
        parse_name(name)
    assert FORMS in str(error.value)


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="is a file; expected the folder"):
        parse_name(str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("", "empty"),
        ("  ", "empty"),
        ("timm:", "expected a name after 'timm'"),
        ("opn_clip:ViT-B-16/openai", "open_clip:"),
    ],
)
def test_names_of_no_form_are_explained(name, expected):
    with pytest.raises(ValueError, match=expected) as error:
        parse_name(name)
    assert FORMS in str(error.value)


def test_the_names_in_the_list_are_distinct_and_parse_to_their_source():
    assert len({entry.name for entry in ENTRIES}) == len(ENTRIES)
    for entry in ENTRIES:
        source, _ = parse_name(entry.name)
        assert source in (entry.source, "dinov2-small") or (source == "folder" and entry.name in EMBEDDED), entry


@pytest.mark.parametrize("entry", [each for each in ENTRIES if each.source == "timm"], ids=lambda entry: entry.name)
def test_timm_knows_its_names_and_their_size(entry):
    name = "vit_small_patch14_dinov2.lvd142m" if entry.name == "dinov2-small" else entry.name
    assert timm.models.is_model_pretrained(name)
    with torch.device("meta"):
        model = timm.create_model(name)
    assert sum(parameter.numel() for parameter in model.parameters()) == entry.params


def test_open_clip_and_transformers_know_their_names():
    import open_clip

    known = {f"open_clip:{model}/{tag}" for model, tag in open_clip.list_pretrained()}
    assert {entry.name for entry in ENTRIES if entry.source == "open_clip"} - EMBEDDED.keys() <= known
