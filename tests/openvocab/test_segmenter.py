"""The segmenter: what it says about a picture, against the same steps on whole maps, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import clips
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

import selectivit as sv
from selectivit.data.transforms import to_picture, to_tensor
from selectivit.models.cache import WeightsError
from selectivit.openvocab.dense import dense_tokens
from selectivit.openvocab.presets import PRESETS, Preset
from selectivit.openvocab.prompts import find_templates, text_features
from selectivit.openvocab.refine import refine
from selectivit.openvocab.windows import sliding_windows

LABELS = ["road", "car|truck|bus", "sky"]
SMALL = Preset(
    scores="qq",
    normalizer="entmax",
    size=40,
    window=24,
    stride=16,
    logit_scale=20.0,
    threshold=0.5,
    templates="none",
    ffn=False,
)


@pytest.fixture(scope="module")
def clip():
    return clips.open_clip_vit(), clips.WordTokenizer()


def picture(width=60, height=44, seed=1):
    pixels = torch.randint(0, 256, (3, height // 4, width // 4), generator=torch.Generator().manual_seed(seed))
    large = F.interpolate(pixels[None].float(), (height, width), mode="bilinear")[0]
    return large.round().to(torch.uint8)


def pil(pixels):
    return Image.fromarray(pixels.permute(1, 2, 0).numpy())


def slow(clip, words, preset, pixels, target, refined=False):
    """Cosines (Q, H, W) on whole canvases, as the harnesses do it."""
    model, tokenizer = clip
    expected = sv.preprocessing(model)
    fit = {"patch_size": expected.patch_size, "size": preset.size}
    x = to_tensor(pil(pixels), mean=expected.mean, std=expected.std, **fit)
    size = x.shape[-2:]
    texts = text_features(model, tokenizer, words, find_templates(preset.templates))
    total, count = torch.zeros(len(words), *size), torch.zeros(size)
    for w in sliding_windows(tuple(size), preset.window, preset.stride):
        place = (slice(w.top, w.top + w.height), slice(w.left, w.left + w.width))
        with torch.no_grad():
            found = F.normalize(dense_tokens(model, x[:, place[0], place[1]][None], preset).map, dim=1)
        cosines = torch.einsum("qe,behw->bqhw", texts, found)
        total[:, place[0], place[1]] += F.interpolate(cosines, (w.height, w.width), mode="bilinear")[0]
        count[place] += 1
    maps = total / count
    if refined:
        maps = refine(maps, torch.from_numpy(to_picture(pil(pixels), **fit)).permute(2, 0, 1) / 255)
    return F.interpolate(maps[None], target, mode="bilinear")[0]


@pytest.mark.parametrize("window", [True, False])
@pytest.mark.parametrize("refined", [True, False])
@pytest.mark.parametrize("threshold", [None, 0.5])
def test_against_whole_canvases(clip, window, refined, threshold):
    preset = SMALL if window else replace(SMALL, window=None, stride=None)
    pixels, words = picture(), ["road", "car", "truck", "bus", "sky"]
    segmenter = sv.OpenVocabularySegmenter(clip, LABELS, preset, refine=refined, threshold=threshold)
    found = segmenter(pixels, scores="image")
    probabilities = (20 * slow(clip, words, preset, pixels, (44, 60), refined)).softmax(0)
    groups = [[0], [1, 2, 3], [4]]
    classes = torch.stack([probabilities[g].amax(0) for g in groups])
    best, want = classes.max(0)
    names = ("road", "car", "sky")
    if threshold is not None:
        want = torch.where(best < threshold, 0, want + 1)
        classes, names = torch.cat([torch.zeros(1, 44, 60), classes]), ("background", *names)
        assert 0.1 < (want == 0).float().mean() < 0.9
    assert found.names == names and found.has_background == (threshold is not None)
    assert found.index_map.shape == (44, 60) and found.index_map.dtype == torch.int32
    torch.testing.assert_close(found.scores, classes, atol=1e-5, rtol=1e-4)
    assert (found.index_map == want).float().mean() > 0.999  # but for ties by rounding
    assert len(want.unique()) >= 3
    shares = found.shares()
    assert list(shares) == list(names) and sum(shares.values()) == pytest.approx(1, abs=1e-6)


def test_background_by_words(clip):
    pixels = picture()
    plain = sv.OpenVocabularySegmenter(clip, ["wall", *LABELS], SMALL)(pixels)
    found = sv.OpenVocabularySegmenter(clip, LABELS, SMALL, background=["wall"])(pixels)
    assert found.names == ("background", "road", "car", "sky")
    assert torch.equal(found.index_map, plain.index_map) and torch.equal(found.scores, plain.scores)
    both = sv.OpenVocabularySegmenter(clip, LABELS, SMALL, background="wall|floor", threshold=0.6)
    assert both.labels[0].words == ("wall", "floor") and both.threshold == 0.6
    assert sv.OpenVocabularySegmenter(clip, LABELS, SMALL, background=True).threshold == SMALL.threshold


def test_a_path_a_picture_and_a_tensor_are_the_same(clip, tmp_path):
    pixels = picture()
    pil(pixels).save(tmp_path / "a.png")
    segmenter = sv.OpenVocabularySegmenter(clip, LABELS, SMALL)
    want = segmenter(pixels)
    for image in (tmp_path / "a.png", str(tmp_path / "a.png"), pil(pixels)):
        assert torch.equal(segmenter(image).index_map, want.index_map)
    turned = pil(pixels).convert("RGBA")
    assert torch.equal(segmenter(turned).index_map, want.index_map)


def test_scores_at_a_chosen_resolution(clip):
    segmenter = sv.OpenVocabularySegmenter(clip, LABELS, SMALL)
    assert segmenter(picture()).scores.shape == (3, 5, 7)  # 40 x 56 px in patches of 8
    assert segmenter(picture(), scores=(11, 3)).scores.shape == (3, 11, 3)
    with pytest.raises(ValueError, match="scores="):
        segmenter(picture(), scores="all")
    with pytest.raises(MemoryError, match="lower"):
        segmenter(picture(), scores=(10**6, 10**6))


@pytest.mark.parametrize("name", [*clips.CLIPS])
def test_every_kind_of_clip_segments(name):
    model = clips.CLIPS[name]()
    tokenizer = clips.WordTokenizer()
    if name.startswith("transformers"):
        tokenizer = clips.transformers_tokenizer(["road", "car", "truck", "bus", "sky"])
    before = {key: value.clone() for key, value in model.state_dict().items()}
    found = sv.OpenVocabularySegmenter((model, tokenizer), LABELS, SMALL, templates="none")(picture(33, 70))
    assert found.index_map.shape == (68, 32) or found.index_map.shape == (70, 33)
    assert found.scores.isfinite().all()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_the_models_own_logit_scale(clip):
    segmenter = sv.OpenVocabularySegmenter(clip, LABELS, replace(SMALL, logit_scale=None))
    pixels = picture()
    scale = clip[0].logit_scale.exp().item()
    other = sv.OpenVocabularySegmenter(clip, LABELS, replace(SMALL, logit_scale=scale))
    torch.testing.assert_close(segmenter(pixels).scores, other(pixels).scores)


def test_one_pixel_and_long_pictures(clip):
    segmenter = sv.OpenVocabularySegmenter(clip, LABELS, SMALL)
    assert segmenter(torch.zeros(3, 1, 1, dtype=torch.uint8)).index_map.shape == (1, 1)
    assert segmenter(torch.zeros(3, 3, 300, dtype=torch.uint8)).index_map.shape == (3, 300)


def test_threads_share_a_model(clip):
    from concurrent.futures import ThreadPoolExecutor

    one, other = (sv.OpenVocabularySegmenter(clip, LABELS, replace(SMALL, scores=s)) for s in ("qq", "kk"))
    work = [(segmenter, picture(seed=seed)) for seed in range(4) for segmenter in (one, other)]
    want = [segmenter(pixels).scores for segmenter, pixels in work]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda job: job[0](job[1]).scores, work))
    # A thread of the pool may split a sum over more cores than the main one, so the last bits may differ; the other
    # segmenter's attention would differ in the second digit.
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0.0)
    assert all((a - b).abs().max() > 1e-3 for a, b in zip(want[::2], want[1::2], strict=True))


# ---- loading


def test_a_local_open_clip_folder(tmp_path):
    pytest.importorskip("ftfy")
    from open_clip.model import CLIP

    text = clips.TEXT | {"vocab_size": 49408, "context_length": 77}
    model = clips.randomise(CLIP(clips.EMBED, clips.VISION, text, quick_gelu=True))
    clips.save_open_clip(tmp_path / "clip", model)
    config = json.loads((tmp_path / "clip" / "open_clip_config.json").read_text())
    config["model_cfg"]["text_cfg"] = text
    (tmp_path / "clip" / "open_clip_config.json").write_text(json.dumps(config))
    segmenter = sv.OpenVocabularySegmenter(str(tmp_path / "clip"), ["road", "猫", "дорога"], SMALL, templates="photo")
    import open_clip

    tokens = open_clip.get_tokenizer("ViT-B-16")(["a photo of a road."])
    want = F.normalize(model.encode_text(tokens), dim=-1)[0].detach()
    torch.testing.assert_close(segmenter._texts()[0], want, atol=1e-5, rtol=1e-5)
    assert segmenter._expected.mean == (0.5, 0.5, 0.5)
    assert segmenter(picture()).names == ("road", "猫", "дорога")


@pytest.mark.parametrize("family", ["CLIP", "Siglip"])
def test_a_local_transformers_folder(tmp_path, family):
    model = clips.transformers_model(family)
    model.save_pretrained(tmp_path / "clip")
    with pytest.raises(WeightsError, match="tokenizer"):
        sv.OpenVocabularySegmenter(tmp_path / "clip", LABELS, SMALL)
    tokenizer = clips.transformers_tokenizer(["road", "car", "truck", "bus", "sky"])
    tokenizer.save_pretrained(tmp_path / "clip")
    options = {"templates": "none"}
    found = sv.OpenVocabularySegmenter(tmp_path / "clip", LABELS, SMALL, **options)(picture())
    want = sv.OpenVocabularySegmenter((model, tokenizer), LABELS, SMALL, **options)(picture())
    assert torch.equal(found.index_map, want.index_map)


def test_names_are_told_apart(monkeypatch):
    from selectivit.models.clip import _with_prefix

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert _with_prefix("ViT-B-16/openai") == "open_clip:ViT-B-16/openai"
    assert _with_prefix("openai/clip-vit-base-patch16") == "openai/clip-vit-base-patch16"
    with pytest.raises(ValueError, match="images and texts"):
        sv.OpenVocabularySegmenter("dinov2-small", LABELS)
    with pytest.raises(WeightsError, match="no weights 'openia'"):
        sv.OpenVocabularySegmenter("ViT-B-16/openia", LABELS)
    with pytest.raises(WeightsError, match="not on this machine"):
        sv.OpenVocabularySegmenter("ViT-B-16/laion2b_s34b_b88k", LABELS)


# ---- what is refused


@pytest.mark.parametrize(
    ("labels", "options", "text"),
    [
        (LABELS, {"preset": "entmax"}, "did you mean 'entmax-"),
        (LABELS, {"threshold": 1.5}, "probability"),
        (LABELS, {"preset": "gem", "background": True}, "no threshold"),
        (["road"], {"threshold": 0.5}, "single word"),
        (["background", "road"], {"threshold": 0.5}, "called 'background'"),
        (LABELS, {"background": ["road"]}, "more than once"),
        (LABELS, {"templates": "all"}, "unknown templates"),
        (LABELS, {"preset": replace(SMALL, window=20, stride=16)}, "multiples of the patch"),
        ([], {}, "at least one"),
    ],
)
def test_bad_settings(clip, labels, options, text):
    with pytest.raises(ValueError, match=text):
        sv.OpenVocabularySegmenter(clip, labels, **options)


def test_bad_models_and_pictures(clip, tmp_path):
    with pytest.raises(ValueError, match="pair"):
        sv.OpenVocabularySegmenter(clip[0], LABELS)
    with pytest.raises(ValueError, match="tokenizer"):
        sv.OpenVocabularySegmenter((clip[0], None), LABELS)
    with pytest.raises(ValueError, match="no image tower"):
        sv.OpenVocabularySegmenter((clips.transformers_model("CLIP").text_model, clip[1]), LABELS)
    with pytest.raises(ValueError, match="training mode"):
        sv.OpenVocabularySegmenter((clips.open_clip_vit().train(), clip[1]), LABELS)
    segmenter = sv.OpenVocabularySegmenter(clip, LABELS, SMALL)
    with pytest.raises(ValueError, match="not yet normalised"):
        segmenter(torch.rand(3, 8, 8))
    with pytest.raises(ValueError, match="one picture"):
        segmenter(torch.zeros(2, 3, 8, 8, dtype=torch.uint8))
    with pytest.raises(TypeError, match="path"):
        segmenter([1, 2])
    (tmp_path / "a.jpg").write_text("no photo")
    with pytest.raises(ValueError, match="not a picture"):
        segmenter(tmp_path / "a.jpg")


def test_towers_of_different_width_are_named(clip):
    model = clips.timm_siglip()
    model.text.text_projection.data = torch.randn(clips.WIDTH, clips.EMBED)
    with pytest.raises(ValueError, match="32 channels and texts 16"):
        sv.OpenVocabularySegmenter((model, clip[1]), LABELS, SMALL)(picture())


def test_nan_weights_are_named(clip):
    model = clips.open_clip_vit()
    with torch.no_grad():
        model.text_projection.fill_(float("nan"))
    with pytest.raises(ValueError, match="NaN"):
        sv.OpenVocabularySegmenter((model, clip[1]), LABELS)


# ---- memory

PEAK = """
import resource, sys, torch, time
sys.path.insert(0, {tests!r})
import clips, selectivit as sv
from selectivit.openvocab.presets import PRESETS
from dataclasses import replace
model, tokenizer = clips.open_clip_vit(), clips.WordTokenizer()
atoms = list({{int(tokenizer([str(i)])[0, 0]): str(i) for i in range(600)}}.values())
segmenter = sv.OpenVocabularySegmenter((model, tokenizer), atoms[:150], replace(PRESETS["sclip"], size={size}))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.perf_counter()
found = segmenter(torch.randint(0, 256, (3, {height}, {width}), dtype=torch.uint8))
assert found.index_map.shape == ({height}, {width})
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(peak / 2**20, before / 2**20, time.perf_counter() - start)
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("size", [336, 3000])
def test_a_large_photo_with_150_classes_stays_below_3_gb(size, request):
    code = PEAK.format(tests=str(request.path.parent), size=size, height=3000, width=4000)
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert float(out.split()[0]) < 3.0, out


def test_peak_memory_does_not_grow_with_the_picture(clip, monkeypatch):
    """No block of rows is larger than the bound, however many pixels and words there are."""
    from selectivit.openvocab import windows

    monkeypatch.setattr(windows, "BLOCK_ELEMENTS", 50_000)
    sizes, scaled = [], windows._scaled

    def watched(*args, **kwargs):
        out = scaled(*args, **kwargs)
        sizes.append(out.numel())
        return out

    monkeypatch.setattr(windows, "_scaled", watched)
    sv.OpenVocabularySegmenter(clip, LABELS, SMALL)(torch.zeros(3, 900, 1200, dtype=torch.uint8))
    assert max(sizes) <= 50_000 and len(sizes) > 100


def test_the_page_lists_the_presets_as_they_are(request):
    page = (request.config.rootpath / "docs" / "openvocab.md").read_text()
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    for name, preset in PRESETS.items():
        short = name.removeprefix("entmax") if name.startswith("entmax") and name != "entmax-qk" else name
        row = next(cells for cells in rows if f"`{short}`" in cells[0])
        around = "whole" if preset.window is None else f"{preset.window}/{preset.stride}"
        assert row[3] == f"{preset.size}; {around}"
        scale = "the model's" if preset.logit_scale is None else f"{preset.logit_scale:g}"
        threshold = "none" if preset.threshold is None else f"{preset.threshold:g}"
        assert row[4] == f"{scale}; {threshold}"
        assert row[5] == ("80" if preset.templates == "imagenet80" else '"a photo of a {}."')
        dropped = not preset.residual and not preset.ffn
        assert dropped == ("both dropped" in row[2])


def test_presets_have_sources_and_settings_as_published():
    assert all(preset.source for preset in PRESETS.values())
    sclip, clear, near = PRESETS["sclip"], PRESETS["clearclip"], PRESETS["naclip"]
    assert (sclip.size, sclip.window, sclip.stride, sclip.logit_scale, sclip.threshold) == (336, 224, 112, 40, 0.1)
    assert (clear.size, clear.window, clear.stride, clear.logit_scale, clear.threshold) == (448, 448, 224, 50, 0.5)
    assert (near.size, near.window, near.stride, near.logit_scale, near.threshold) == (336, 224, 112, 40, 0.1)
    assert PRESETS["gem"].layers == 6 and PRESETS["entmax-qq"].alpha == 1.2 and PRESETS["entmax-qq"].threshold == 0.75
