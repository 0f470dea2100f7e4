"""Dense features of a photo by onnxruntime alone: python serve_onnx.py MODEL.onnx PHOTO [CORES]."""

import json
import sys

import numpy as np
import onnxruntime
from PIL import Image

session = onnxruntime.InferenceSession(sys.argv[1])
about = json.loads(session.get_modelmeta().custom_metadata_map["selectivit"])["image"]
photo = Image.open(sys.argv[2]).convert("RGB").resize((about["width"], about["height"]), Image.Resampling.BICUBIC)
pixels = (np.asarray(photo, np.float32) / 255 - np.float32(about["mean"])) / np.float32(about["std"])
inputs = {"images": pixels.transpose(2, 0, 1)[None]} | (
    {"num_cores": np.array(int(sys.argv[3]))} if sys.argv[3:] else {}
)
names = [output.name for output in session.get_outputs()]
found = dict(zip(names, session.run(names, inputs), strict=True))
print({name: tensor.shape for name, tensor in found.items()})
np.savez("features.npz", **found)
