import pytest

from selectivit.cli.options import parse_layers, parse_patch, pick_device


@pytest.mark.parametrize(
    ("text", "layers"), [("all", None), ("-1", -1), (-4, -4), ("0,5,11", [0, 5, 11]), ("11,", [11]), (" -1 ", -1)]
)
def test_layers(text, layers):
    assert parse_layers(text) == layers


@pytest.mark.parametrize("text", ["", "some", "1.5", "1;2"])
def test_layers_that_are_none(text):
    with pytest.raises(ValueError, match="--layers all"):
        parse_layers(text)


@pytest.mark.parametrize("text", ["", "3", "1,2,3", "a,b"])
def test_patches_that_are_none(text):
    with pytest.raises(ValueError, match="ROW,COLUMN"):
        parse_patch(text)


@pytest.mark.parametrize("name", ["gpu", "cuda:99", "cpux"])
def test_devices_that_are_not_there(name):
    with pytest.raises(ValueError, match="expected"):
        pick_device(name)


def test_auto_is_a_device_that_is_there(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert pick_device("auto").type == "cpu"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device("auto", local_rank=1) == torch.device("cuda", 1)
