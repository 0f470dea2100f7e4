"""`export_features`: the file against the model, at sizes and budgets that the export did not see."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

import selectivit as sv
from selectivit.export.formats import ExportError
from selectivit.export.program import named
from selectivit.ops.graph import plain_operators

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "swap"))
from swap_hosts import HOSTS, images, randomise  # noqa: E402

BANK = 12


@cache
def veca(attention="softmax"):
    torch.manual_seed(0)
    shape = {"patch_size": 8, "dim": 16, "depth": 2, "num_heads": 2, "hidden_dim": 24, "num_cores": BANK}
    model = sv.create_model("veca_tiny_patch14", **shape, attention=attention).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    return model


def run_onnx(path, x, num_cores=None):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    given = {"images": x.numpy()} | ({} if num_cores is None else {"num_cores": np.array(num_cores)})
    return {n: torch.from_numpy(t) for n, t in zip(names, session.run(names, given), strict=True)}


def run_torch(path, x, num_cores=None):
    module = torch.export.load(path).module()
    return module(x) if num_cores is None else module(x, num_cores=num_cores)


RUN = {"onnx": run_onnx, "torch": run_torch}


def check(model, path, format, sizes, budgets=(None,), **options):
    for size in sizes:
        for budget in budgets:
            x = images(*size, seed=sum(size))
            with torch.no_grad():
                expected = named(sv.features(model, x, num_cores=budget or options.get("num_cores"), **{
                    k: v for k, v in options.items() if k != "num_cores"
                }))  # fmt: skip
            found = RUN[format](path, x, budget)
            assert list(found) == list(expected)
            for name, tensor in expected.items():
                torch.testing.assert_close(found[name], tensor, atol=1e-4, rtol=1e-4)


SIZES = ((1, 32, 32), (3, 24, 40), (2, 48, 16), (1, 64, 32))


@pytest.mark.parametrize(
    ("name", "alpha", "format"),
    [
        ("timm ViT", 1.5, "onnx"),
        ("timm DINOv3", 1.2, "torch"),
        *(
            pytest.param(*case, "onnx", marks=pytest.mark.slow)
            for case in (
                ("timm DINOv3", 1.2),
                ("timm DINOv2 (registers)", 1.3),
                ("transformers DINOv2", 2.0),
                ("transformers DINOv3", 1.5),
                ("torchvision ViT", 1.5),
                ("open_clip CLIP", None),
            )
        ),
    ],
)
def test_hosts_at_sizes_that_the_export_did_not_see(name, alpha, format, tmp_path):
    model = randomise(HOSTS[name].build())
    if alpha is not None:
        sv.swap_attention(model, "entmax", alpha=alpha, layers=-1)
    done = sv.export_features(model, tmp_path / f"m.{'onnx' if format == 'onnx' else 'pt2'}", format=format)
    assert done.largest_difference < 1e-4 and done.size == done.path.stat().st_size
    check(model, str(done.path), format, SIZES)
    if format == "onnx" and alpha is not None:
        nodes = onnx.load(done.path).graph.node
        assert "Loop" in {node.op_type for node in nodes}
        assert all(node.domain in ("", "ai.onnx") for node in nodes)
    if alpha is not None:
        sv.restore_attention(model)
        with pytest.raises(AssertionError):  # the swap is in the file, and not softmax
            check(model, str(done.path), format, SIZES[:1])


class Attention(torch.nn.Module):
    def forward(self, q):
        return sv.entmax_attention(q, q, q, alpha=1.5)


def test_sizes_of_an_earlier_export_are_no_constants_of_the_next(tmp_path):
    with torch.no_grad(), plain_operators():
        for batch in (2, 3):
            torch.export.export(Attention(), (torch.randn(batch, 2, 6, 8),))
    model = randomise(HOSTS["timm ViT"].build())
    with sv.swap_attention(model, "entmax", layers=-1):
        done = sv.export_features(model, tmp_path / "m.pt2", format="torch")
        check(model, done.path, "torch", SIZES[:2])


def test_a_torch_program_runs_without_this_package(tmp_path):
    model = randomise(HOSTS["timm ViT"].build())
    factors = torch.tensor([0.5, 0.8])
    with sv.swap_attention(model, "entmax", alpha=1.5, layers=[1], scores="qq+kk", scale=factors):
        done = sv.export_features(model, tmp_path / "m.pt2", format="torch", layer=1, norm=False)
        check(model, done.path, "torch", SIZES[:3], layer=1, norm=False)
        x = images(1, 40, 24)
        with torch.no_grad():
            expected = sv.features(model, x, layer=1, norm=False).map
    torch.save({"x": x, "expected": expected}, tmp_path / "io.pt")
    code = f"""
import sys, json, torch
extra = {{"selectivit.json": ""}}
program = torch.export.load({str(done.path)!r}, extra_files=extra)
io = torch.load({str(tmp_path / "io.pt")!r})
found = program.module()(io["x"])
torch.testing.assert_close(found["map"], io["expected"], atol=1e-4, rtol=1e-4)
assert json.loads(extra["selectivit.json"])["image"]["patch_size"] == 8
assert not [m for m in sys.modules if m.startswith("selectivit")]
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_blocks_and_parameters_that_are_not_needed_stay_out(tmp_path):
    model = randomise(HOSTS["open_clip CLIP"].build())
    first = sv.export_features(model, tmp_path / "m.pt2", format="torch", layer=0, dynamic=False)
    names = list(torch.export.load(first.path).state_dict)
    assert names and not any("resblocks.1" in n or "resblocks.2" in n or "token_embedding" in n for n in names)


@pytest.fixture(scope="module", params=["onnx", "torch"])
def elastic(request, tmp_path_factory):
    """A file whose budget is an input."""
    path = tmp_path_factory.mktemp("elastic") / ("m.onnx" if request.param == "onnx" else "m.pt2")
    return request.param, sv.export_features(veca("entmax15"), path, format=request.param, num_cores="input")


def test_a_budget_as_an_input(elastic):
    format, done = elastic
    check(veca("entmax15"), str(done.path), format, SIZES[1:3], (1, 2, 7, BANK))
    assert done.description["inputs"]["num_cores"]["most"] == BANK
    for outside in (0, BANK + 1, -1):
        with pytest.raises(Exception, match=r"Guard failed|onnxruntime|ONNXRuntime"):
            RUN[format](str(done.path), images(), outside)


@pytest.mark.parametrize("elastic", ["onnx"], indirect=True)
def test_served_without_torch(elastic, tmp_path):
    from PIL import Image

    code = (ROOT / "examples" / "serve_onnx.py").read_text()
    assert "torch" not in code and "selectivit" not in code.replace('"selectivit"', "")
    photo = ROOT / "examples" / "cat.jpg"
    command = [sys.executable, str(ROOT / "examples" / "serve_onnx.py"), str(elastic[1].path), str(photo), "3"]
    out = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert "(1, 3, 16)" in out
    found = np.load(tmp_path / "features.npz")
    model = veca("entmax15")
    side, about = model.config.image_size, model.config
    pixels = np.asarray(Image.open(photo).convert("RGB").resize((side, side), Image.Resampling.BICUBIC)) / 255
    x = torch.tensor((pixels - about.mean) / about.std, dtype=torch.float32).permute(2, 0, 1)
    with torch.no_grad():
        expected = sv.features(model, x, num_cores=3)
    torch.testing.assert_close(torch.from_numpy(found["map"]), expected.map, atol=1e-4, rtol=1e-4)


def test_a_fixed_budget_and_a_fixed_size(tmp_path):
    done = sv.export_features(veca(), tmp_path / "m.onnx", num_cores=5, dynamic=False, size=(24, 40))
    check(veca(), str(done.path), "onnx", [(1, 24, 40)], num_cores=5)
    assert done.description["outputs"] == {
        "map": ["1", "16", "3", "5"], "cls": ["1", "16"], "cores": ["1", "5", "16"]
    }  # fmt: skip
    with pytest.raises(Exception, match="invalid dimensions"):
        run_onnx(str(done.path), images(1, 32, 32))


def test_the_file_says_all_that_a_server_needs(tmp_path):
    model = randomise(HOSTS["transformers CLIP"].build())
    with sv.swap_attention(model, "sparsemax", layers=-1) as swap:
        done = sv.export_features(model, tmp_path / "m.onnx", size=48)
        check(model, str(done.path), "onnx", SIZES[:2])
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"))
    about = json.loads(session.get_modelmeta().custom_metadata_map["selectivit"])
    expected = sv.preprocessing(model)
    assert about["image"]["mean"] == list(expected.mean) and about["image"]["std"] == list(expected.std)
    assert (about["image"]["height"], about["image"]["patch_size"]) == (48, 8)
    assert about["outputs"]["map"] == ["batch", "32", "height / patch_size", "width / patch_size"]
    assert list(about["attention"].values()) == ["sparsemax alpha=2.0 scores=qk"]
    assert next(iter(about["attention"])) in swap.replaced[0]
    assert session.get_inputs()[0].shape == ["batch", 3, "height", "width"]


# --- what cannot be -----------------------------------------------------------------------------------------------


def test_what_is_refused_before_anything_is_traced(tmp_path):
    model, out = randomise(HOSTS["timm ViT"].build()), tmp_path / "m.onnx"
    for told, options in (
        (r"unknown format 'onxx': expected 'onnx' or 'torch'", {"format": "onxx"}),
        (r"a path that ends in \.pt2", {"format": "torch"}),
        (r"whole patches of 8 px, got 30 x 30; the nearest is 32 x 32", {"size": 30}),
        (r"layer=9 is out of range: this model has 3 blocks", {"layer": 9}),
        (r"num_cores is a budget of cores, which VisionTransformer does not have", {"num_cores": "input"}),
        (r"num_cores is a budget of cores, which VisionTransformer does not have", {"num_cores": 4}),
        (r"expected num_cores as a number, None for all cores or 'input', got 'all'", {"num_cores": "all"}),
    ):
        with pytest.raises(ValueError, match=told):
            sv.export_features(model, out, **options)
    with pytest.raises(ValueError, match="budget of 1 to 12 cores, got num_cores=13"):
        sv.export_features(veca(), out, num_cores=13)
    with pytest.raises(ValueError, match=r"call model.eval\(\)"):
        sv.export_features(HOSTS["timm ViT"].build().train(), out)
    with pytest.raises(ValueError, match=r"float32, got torch.float64: call model.float\(\)"):
        sv.export_features(HOSTS["timm ViT"].build().eval().double(), out)
    with pytest.raises(ValueError, match="no image tower found in Linear"):
        sv.export_features(torch.nn.Linear(2, 2), out)
    with sv.swap_attention(model, "random_mask"), pytest.raises(ValueError, match="under a random mask"):
        sv.export_features(model, out)
    steep = torch.tensor([1.5, 2.5])
    with sv.swap_attention(model, "entmax", alpha=steep), pytest.raises(ValueError, match=r"largest is 2\.5"):
        sv.export_features(model, out)
    assert not any(tmp_path.iterdir())


def test_what_a_format_lacks_is_named_and_nothing_is_written(tmp_path, monkeypatch):
    model, out = randomise(HOSTS["timm ViT"].build()), tmp_path / "m.onnx"
    out.write_bytes(b"earlier")

    class Odd(torch.nn.Module):
        def forward(self, x):
            return torch.linalg.eigvals(x[..., :2, :2]).real.sum() * 0 + x

    model.pos_drop = Odd().eval()
    with pytest.raises(ExportError, match=r"by ONNX: it has no operator for aten.linalg_eig.* try format='torch'"):
        sv.export_features(model, out, dynamic=False)
    monkeypatch.setattr("selectivit.export.formats.LARGEST", 10)
    with pytest.raises(ExportError, match="an ONNX file holds 2: use format='torch'"):
        sv.export_features(veca(), out, dynamic=False)
    assert out.read_bytes() == b"earlier" and len(list(tmp_path.iterdir())) == 1


def test_a_file_that_does_not_run_or_gives_other_numbers_is_refused(tmp_path, monkeypatch):
    from selectivit.export import check as module

    right = module.torch_runner

    def broken(data):
        def run(x, budget):
            raise RuntimeError("Guard failed")

        return run

    def wrong(data):
        run = right(data)
        return lambda x, budget: {n: t + 1e-3 * t.abs().max() for n, t in run(x, budget).items()}

    for runner, told in (
        (broken, r"Veca was exported, but the file does not run: Guard failed; nothing was written"),
        (wrong, r"other numbers than the model: they differ by 0.00"),
    ):
        monkeypatch.setattr(module, "torch_runner", runner)
        with pytest.raises(ExportError, match=told):
            sv.export_features(veca(), tmp_path / "m.pt2", format="torch", dynamic=False)
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_real_dinov2_small(tmp_path):
    model = sv.load_model("dinov2-small")
    x = sv.load_image(ROOT / "examples" / "astronaut.jpg", sv.preprocessing(model), size=224)
    wide = sv.load_image(ROOT / "examples" / "coffee.jpg", sv.preprocessing(model), size=224)
    calibration = sv.calibrate_swap(model, x, max_support=0.25)
    with sv.swap_attention(model, "entmax", layers=None, scale=calibration):
        done = sv.export_features(model, tmp_path / "m.onnx", size=224)
        with torch.no_grad():
            for photo in (x, wide):
                found, expected = run_onnx(str(done.path), photo)["map"], sv.features(model, photo).map
                assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
    assert 80e6 < done.size < 95e6
