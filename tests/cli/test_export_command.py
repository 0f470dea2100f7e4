"""`selectivit export`: a file, what it takes and gives, and what cannot be."""

import json

import numpy as np
import onnxruntime
import torch


def test_a_swapped_model_becomes_a_file(run, tiny_model, tmp_path):
    status, out, err = run("export", "--model", tiny_model, "--normalizer", "entmax", "--layers", -1, "--size", 48)
    assert status == 0, err
    path = tmp_path / "out" / "tiny.onnx"
    assert str(path.relative_to(tmp_path)) in out and "largest difference" in out
    said = json.loads(out[: out.rindex("}") + 1])
    assert said["outputs"]["map"][1] == "32" and said["image"]["height"] == 48
    import selectivit as sv

    model, x = sv.load_model(tiny_model), torch.randn(2, 3, 40, 24)
    found = onnxruntime.InferenceSession(path).run(["map"], {"images": x.numpy()})[0]
    with torch.no_grad(), sv.swap_attention(model, layers=-1):
        expected = sv.features(model, x).map
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_what_cannot_be(run, tiny_model, tmp_path):
    for more, told in (
        (("--format", "tflite"), "expected --format onnx or torch"),
        (("--num-cores", "many"), "expected --num-cores as a number or `input`"),
        (("--num-cores", "input"), "does not have"),
        (("--size", 33), "whole patches of 8 px"),
    ):
        status, _, err = run("export", "--model", tiny_model, *more)
        assert status == 2 and told in err
    assert not list((tmp_path / "out").glob("*"))
