"""`selectivit compare`: the picture, the numbers against the entmax package, and bad input."""

import json
from pathlib import Path

import pytest
import torch

from conftest import write_photo

ASTRONAUT = Path(__file__).parents[2] / "examples" / "astronaut.jpg"


@pytest.fixture
def compare(run, tiny_model, tmp_path):
    photo = write_photo(tmp_path / "photo.jpg", size=(120, 80))

    def call(*more, photo=photo, model=tiny_model):
        status, text, err = run("compare", photo, "--model", model, "--size", 64, *more)
        report = tmp_path / "out" / f"{photo.stem}.compare.json"
        return status, text, err, json.loads(report.read_text()) if report.is_file() else None

    return call


def test_writes_a_picture_and_numbers_named_after_the_photo(compare, tmp_path):
    status, text, err, report = compare("--max-support", 0.6)
    assert (status, err) == (0, "")
    files = [Path("out/photo.compare.png"), Path("out/photo.compare.json")]
    assert report["files"] == [str(f) for f in files] and all(str(f) in text for f in files)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["photo.compare.json", "photo.compare.png"]
    picture = (tmp_path / files[0]).read_bytes()
    assert picture.startswith(b"\x89PNG") and 100_000 < len(picture) < 2_000_000
    assert report["grid"] == [8, 12] and report["image_size"] == [64, 96]
    assert [layer["index"] for layer in report["layers"]] == [0, 1, 2]
    assert all(layer["swapped"] and len(layer["factors"]) == 2 for layer in report["layers"])
    assert report["settings"]["calibrated"] and report["mean"]["swap"]["support_share"] < 0.65
    assert report["mean"]["softmax"]["support_share"] == pytest.approx(1, abs=0.01)
    assert "entmax 1.5" in text and "softmax" in text


def test_the_same_call_gives_the_same_files(compare, tmp_path):
    def content():
        compare("--max-support", 0.6)
        return {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}

    assert content() == content()


@pytest.mark.parametrize("layers", ["all", "-1", "0,2"])
def test_the_numbers_agree_with_the_entmax_package(compare, tiny_model, tmp_path, layers):
    """Hooks on the tiny model's qkv, the entmax package's own entmax15 on them, layer by layer, in float64."""
    entmax = pytest.importorskip("entmax")
    import selectivit as sv
    from selectivit.cli.reading import ready_photo

    report = compare("--no-calibrate", "--layers", layers)[3]
    model = sv.load_model(tiny_model).double()
    swapped = {"all": {0, 1, 2}, "-1": {2}, "0,2": {0, 2}}[layers]

    found = {}

    def attention(i, normalize):
        def forward(x, attn_mask=None, is_causal=False):
            module = model.blocks[i].attn
            b, n, c = x.shape
            q, k, v = module.qkv(x).view(b, n, 3, 2, c // 2).permute(2, 0, 3, 1, 4)
            weights = normalize(q @ k.mT * (c // 2) ** -0.5)
            found[i] = weights
            return module.proj((weights @ v).transpose(1, 2).reshape(b, n, c))

        return forward

    image = ready_photo(tmp_path / "photo.jpg", model, 64).image[None].double()
    for variant in ("softmax", "swap"):
        for i in range(3):
            sparse = variant == "swap" and i in swapped
            normalize = (lambda s: entmax.entmax15(s, dim=-1)) if sparse else (lambda s: s.softmax(-1))
            model.blocks[i].attn.forward = attention(i, normalize)
        with torch.no_grad():
            model.forward_features(image)
        for i, layer in enumerate(report["layers"]):
            entropy = torch.special.entr(found[i]).sum(-1)
            support = (found[i] > 1e-12).double().sum(-1)
            want = {
                "support_size": support.mean((0, 2)),
                "support_share": support.mean((0, 2)) / found[i].shape[-1],
                "entropy": entropy.mean((0, 2)),
                "effective_tokens": entropy.exp().mean((0, 2)),
            }
            assert layer["swapped"] == (i in swapped) and layer["num_tokens"] == found[i].shape[-1]
            for key, heads in want.items():
                assert layer[variant]["heads"][key] == pytest.approx(heads.tolist(), rel=2e-3), (variant, i, key)
                assert layer[variant][key] == pytest.approx(heads.mean().item(), rel=2e-3)
    assert report["layers"][2]["swap"]["support_share"] < 0.9


def test_cosine_is_that_of_the_two_maps(compare, tiny_model, tmp_path):
    import selectivit as sv
    from selectivit.cli.reading import ready_photo

    report = compare("--no-calibrate", "--scores", "kk", "--normalizer", "sparsemax", "--layers", "-2")[3]
    model = sv.load_model(tiny_model)
    image = ready_photo(tmp_path / "photo.jpg", model, 64).image[None]
    with torch.no_grad():
        plain = sv.features(model, image).map
        with sv.swap_attention(model, "sparsemax", alpha=2.0, scores="kk", layers=-2):
            swap = sv.features(model, image).map
    cosine = torch.cosine_similarity(plain, swap, dim=1)
    assert report["features"]["cosine_mean"] == pytest.approx(cosine.mean().item(), abs=1e-5)
    assert report["features"]["cosine_min"] == pytest.approx(cosine.min().item(), abs=1e-5)
    assert [layer["swapped"] for layer in report["layers"]] == [False, True, True]


def test_softmax_against_itself_is_the_same(compare):
    report = compare("--normalizer", "softmax")[3]
    assert report["features"]["cosine_min"] == pytest.approx(1, abs=1e-5)
    assert not report["settings"]["calibrated"]
    for layer in report["layers"]:
        assert layer["swap"]["entropy"] == pytest.approx(layer["softmax"]["entropy"], rel=1e-5)


@pytest.mark.parametrize(
    "swap", [("--normalizer", "sparsemax"), ("--scores", "qq+kk"), ("--scores", "v"), ("--normalizer", "random_mask")]
)
def test_other_swaps(compare, swap):
    status, _, err, report = compare(*swap, "--max-support", 1)
    assert (status, err) == (0, "")
    assert report["settings"]["calibrated"] == (swap[1] in ("sparsemax", "qq+kk"))


def test_the_chosen_patch_and_layer_are_shown(compare):
    report = compare("--patch", "3,5", "--layer", "0", "--no-calibrate")[3]
    assert report["patch"] == [3, 5] and report["settings"]["layer"] == 0
    last = compare("--patch", "3,5", "--no-calibrate")[3]
    assert last["features"] != report["features"] and last["layers"] == report["layers"]


def test_the_default_patch_is_the_one_that_cls_attends_to(compare):
    assert compare("--no-calibrate")[3]["patch"] == compare("--no-calibrate", "--layers", "-1")[3]["patch"]


def test_a_saved_calibration_gives_the_same_again(compare):
    first = compare("--save-calibration", "cal", "--max-support", 0.6)[3]
    second = compare("--calibration", "cal")[3]
    assert first["layers"] == second["layers"] and second["settings"]["calibrated"]


def test_a_photo_beside_the_results_stays(compare, tmp_path):
    photo = write_photo(tmp_path / "out" / "photo.png", size=(120, 80))
    before = photo.read_bytes()
    assert compare("--no-calibrate", photo=photo)[0] == 0
    assert photo.read_bytes() == before


def test_a_model_without_a_class_token(run, tmp_path):
    import timm
    from timm.models._hub import save_for_hf

    sizes = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 32, "num_heads": 2, "num_classes": 0}
    arguments = {**sizes, "class_token": False, "global_pool": "avg"}
    torch.manual_seed(0)
    save_for_hf(timm.create_model("vit_tiny_patch16_224", **arguments), str(tmp_path / "m"), model_args=arguments)
    photo = write_photo(tmp_path / "photo.jpg")
    status, _, err = run("compare", photo, "--model", tmp_path / "m", "--no-calibrate")
    assert (status, err) == (0, "")
    report = json.loads((tmp_path / "out/photo.compare.json").read_text())
    assert "cosine_cls" not in report["features"] and report["layers"][0]["num_tokens"] == 24


@pytest.mark.parametrize(("size", "pixels"), [(8, (120, 80)), (16, (1, 1))])
def test_a_photo_of_few_tokens_gets_the_least_support_there_is(compare, tmp_path, size, pixels):
    from PIL import Image

    photo = tmp_path / "small.png"
    Image.new("RGB", pixels, (90, 160, 30)).save(photo)
    status, text, err, report = compare("--size", size, photo=photo)
    assert (status, err) == (0, "")
    (note,) = [note for note in report["notes"] if "on so few tokens" in note]
    assert "down to 0.25" in note and f"note: {note}" in text
    assert report["settings"]["max_support"] > 0.25 and report["settings"]["calibrated"]
    # What the user asks for is not given up.
    status, _, err, _ = compare("--size", size, "--max-support", 0.25, photo=photo)
    assert status == 2 and "the least is" in err


def test_the_usual_bound_is_said_and_kept_where_it_can_be(compare):
    report = compare("--size", 256)[3]
    assert report["settings"]["max_support"] == 0.25 and report["notes"] == []
    assert report["mean"]["swap"]["support_share"] < 0.28


def test_the_numbers_are_gathered_once(compare, monkeypatch):
    from selectivit.cli import compare_report

    layers, gather = [], compare_report._layer
    monkeypatch.setattr(compare_report, "_layer", lambda statistics: layers.append(1) or gather(statistics))
    compare("--no-calibrate")
    assert len(layers) == 2 * 3 * 2  # two variants, three layers: their heads, and their part in the means


def test_a_calibration_of_another_model_exits_2(compare, tiny_model, tmp_path):
    import timm
    from timm.models._hub import save_for_hf

    compare("--save-calibration", "cal", "--max-support", 0.6)
    arguments = {"img_size": 32, "patch_size": 8, "depth": 3, "embed_dim": 32, "num_heads": 2, "num_classes": 0}
    torch.manual_seed(7)
    save_for_hf(timm.create_model("vit_tiny_patch16_224", **arguments), str(tmp_path / "o"), model_args=arguments)
    status, _, err, _ = compare("--calibration", "cal", model=tmp_path / "o")
    assert status == 2 and "was fitted for VisionTransformer" in err
    status, _, err, _ = compare("--calibration", "cal", "--normalizer", "random_mask")
    assert status == 2 and "asks for random_mask" in err


# ---- bad input


TOO_MUCH = (
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to allocate"
    ),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
    MemoryError(),
)


@pytest.mark.parametrize("error", TOO_MUCH, ids=lambda error: type(error).__name__)
def test_memory_that_runs_out_exits_2(compare, monkeypatch, error):
    from selectivit.cli import comparison

    def full(*_, **__):
        raise error

    monkeypatch.setattr(comparison, "features", full)
    status, text, err, report = compare()
    assert status == 2 and text == "" and report is None
    assert err.startswith("selectivit compare: error: not enough memory: choose a smaller --size")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--alpha", "0.9"), "alpha"),
        (("--alpha", ".nan"), "alpha"),
        (("--normalizer", "relu"), "softmax, entmax"),
        (("--scores", "kx"), "kx"),
        (("--layers", "4"), "expected the last 1 to 3"),
        (("--layers", "0,3"), "3 attention layers"),
        (("--layers", "x"), "--layers all"),
        (("--layer", "3"), "from 0 to 2"),
        (("--patch", "8,0"), "8 rows and 12 columns"),
        (("--patch", "1"), "ROW,COLUMN"),
        (("--size", "-5"), "at least 1"),
        (("--device", "tpu9"), "--device"),
        (("--max-support", "2"), "max_support"),
        (("--calibration", "nowhere"), "nowhere"),
    ],
)
def test_settings_that_cannot_be_exit_2_and_write_nothing(compare, tmp_path, options, words):
    status, text, err, _ = compare(*options)
    assert status == 2 and text == "" and words in err and err.startswith("selectivit compare: error: ")
    assert list((tmp_path / "out").glob("*")) == []


@pytest.mark.parametrize("bad", ["missing", "text", "folder"])
def test_a_photo_that_cannot_be_read_exits_2(compare, tmp_path, bad):
    photo = tmp_path / "bad.jpg"
    if bad == "text":
        photo.write_text("no photo")
    elif bad == "folder":
        photo.mkdir()
    status, text, err, report = compare(photo=photo)
    assert status == 2 and text == "" and "bad.jpg" in err and report is None


def test_a_model_without_attention_exits_2(compare, tmp_path):
    import timm
    from timm.models._hub import save_for_hf

    save_for_hf(timm.create_model("resnet18"), str(tmp_path / "cnn"), safe_serialization=True)
    status, _, err, report = compare(model=tmp_path / "cnn")
    assert status == 2 and report is None and "VisionTransformer" in err and "ResNet" in err


def test_a_target_that_cannot_be_written_exits_2(compare, tmp_path):
    (tmp_path / "file").write_text("in the way")
    status, _, err, _ = compare("--out", tmp_path / "file" / "out")
    assert status == 2 and "cannot write" in err


# ---- the real thing


@pytest.mark.slow
@pytest.mark.network
def test_real_weights_on_the_astronaut(capsys, tmp_path):
    """At a quarter of the support a calibrated swap keeps softmax's features; without calibration it does not."""
    from selectivit.cli.main import main

    reports = []
    for more in ([], ["--no-calibrate"]):
        assert main(["compare", str(ASTRONAUT), "--out", str(tmp_path), *more]) == 0
        reports.append(json.loads((tmp_path / "astronaut.compare.json").read_text()))
    fitted, plain = reports
    assert fitted["grid"] == [37, 37] and len(fitted["layers"]) == 12
    assert fitted["mean"]["swap"]["support_share"] < 0.26 and fitted["features"]["cosine_mean"] > 0.95
    assert plain["mean"]["swap"]["support_share"] < 0.05 and plain["features"]["cosine_mean"] < 0.8
    assert (tmp_path / "astronaut.compare.png").stat().st_size < 2_000_000


def test_a_calibration_that_cannot_be_written_says_so(compare, tmp_path):
    (tmp_path / "taken").write_text("a file")
    status, _, err, _ = compare("--save-calibration", tmp_path / "taken", "--max-support", 0.6)
    assert status == 2 and "cannot write the calibration" in err and "choose another folder" in err


def test_a_photo_of_many_patches_is_announced(compare, monkeypatch):
    from selectivit.cli import compare as command

    monkeypatch.setattr(command, "LONG", 3)
    assert "--size makes it less" in compare("--max-support", 0.6)[2]
