"""Dense CLIP tokens: the recorded outputs, every preset written out anew, every host, any size."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import clips
import entmax as entmax_package
import pytest
import torch
from safetensors import safe_open
from torch.nn import functional as F

from selectivit.openvocab.dense import dense_tokens
from selectivit.openvocab.presets import PRESETS, Preset

ROOT = Path(__file__).parents[2]
ORACLE = Path(os.environ.get("SELECTIVIT_SHARED", ROOT / ".." / "shared")) / "oracles" / "clip_dense.safetensors"


@pytest.fixture(scope="module")
def oracle():
    if not ORACLE.is_file():
        pytest.skip("the recorded outputs are not here")
    with safe_open(ORACLE, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
        return tensors, json.loads(file.metadata()["config"])


@pytest.mark.parametrize(
    ("recorded", "preset"),
    [
        ("vanilla_vanilla_0", "clip"),
        ("sclip", "sclip"),
        ("reduced_naclip_5", "naclip"),
        ("reduced_kk_0", replace(PRESETS["naclip"], neighbourhood=None)),
    ],
)
def test_recorded_outputs_of_public_code(oracle, recorded, preset):
    from open_clip.model import CLIP

    tensors, config = oracle
    vision = {key: config[key] for key in ("image_size", "patch_size", "width", "layers")}
    vision["head_width"] = config["width"] // config["heads"]
    model = CLIP(config["embed_dim"], vision, clips.TEXT, quick_gelu=True).eval()
    weights = {name.removeprefix("weights.visual."): t for name, t in tensors.items() if name.startswith("weights.")}
    model.visual.load_state_dict(weights)
    with torch.no_grad():
        found = dense_tokens(model, tensors["image"], preset).tokens
    want = tensors[f"tokens.{recorded}"]
    assert (found - want).norm() / want.norm() < 1e-4
    torch.testing.assert_close(found, want, atol=1e-4, rtol=1e-4)


# ---- the presets written out slowly, from the weights of open_clip's own tower


def heads(x):
    return x.unflatten(-1, (clips.HEADS, -1)).transpose(-2, -3)  # (B, H, N, D)


def normalised(scores, preset):
    if preset.normalizer == "softmax":
        return scores.softmax(-1)
    return entmax_package.entmax_bisect(scores.double(), alpha=preset.alpha, dim=-1, n_iter=60).float()


def attention_output(block, x, preset, grid):
    """What the attention module of open_clip gives for normed tokens x, written out."""
    module = block.attn
    q, k, v = map(heads, F.linear(x, module.in_proj_weight, module.in_proj_bias).chunk(3, -1))
    known, d = {"q": q, "k": k, "v": v}, q.shape[-1]
    if preset.scores == "v":
        mixed = v
    else:
        scores = [known[a] @ known[b].mT / d**0.5 for a, b in preset.scores.split("+")]
        if preset.neighbourhood is not None:
            places = [(i, j) for i in range(grid[0]) for j in range(grid[1])]
            for n, (i, j) in enumerate(places):
                for m, (r, c) in enumerate(places):
                    near = torch.tensor(-((i - r) ** 2 + (j - c) ** 2) / (2 * preset.neighbourhood**2)).exp()
                    for part in scores:
                        part[..., 1 + n, 1 + m] += near
        if preset.combine == "scores":
            scores = [sum(scores) / len(scores)]
        maps = [normalised(part, preset) for part in scores]
        mixed = sum(maps) / (1 if preset.combine == "sum" else len(maps)) @ v
    return module.out_proj(mixed.transpose(1, 2).flatten(2))


def gem_output(block, x, preset):
    module = block.attn
    q, k, v = map(heads, F.linear(x, module.in_proj_weight, module.in_proj_bias).chunk(3, -1))
    t = x.norm(dim=-1).mean(-1).reshape(-1, 1, 1, 1) / q.shape[-1] ** 0.5
    total = 0
    for part in (q, k, v):
        part = F.normalize(part, dim=-1)
        part = F.normalize((t * part @ part.mT).softmax(-1) @ part, dim=-1)
        total = total + (t * part @ part.mT).softmax(-1) @ v / 3
    return module.out_proj(total.transpose(1, 2).flatten(2))


def slow_tokens(model, x, preset):
    tower = model.visual
    grid = tuple(side // clips.PATCH for side in x.shape[-2:])
    tokens = tower.conv1(x).flatten(2).transpose(1, 2)
    tokens = torch.cat([tower.class_embedding.expand(len(x), 1, -1), tokens], 1) + tower.positional_embedding
    tokens = tower.ln_pre(tokens)
    blocks = list(tower.transformer.resblocks)
    for block in blocks[: len(blocks) - preset.layers]:
        tokens = block(tokens)
    stream = tokens
    for i, block in enumerate(blocks[-preset.layers :]):
        last = i == preset.layers - 1
        if preset.two_streams:
            stream = stream + gem_output(block, block.ln_1(tokens), preset)
            tokens = block(tokens)
            continue
        added = attention_output(block, block.ln_1(stream), preset, grid)
        stream = added if last and not preset.residual else stream + added
        if preset.ffn or not last:
            stream = stream + block.mlp(block.ln_2(stream))
    return tower.ln_post(stream) @ tower.proj


OWN = {
    "two layers": Preset(scores="kk", normalizer="entmax", layers=2, residual=False, ffn=False),
    "sum of entmax": Preset(scores="qq+kk", normalizer="entmax", combine="sum", ffn=False),
    "mean of scores": Preset(scores="qq+kk+vv", normalizer="entmax", alpha=1.5, combine="scores"),
    "mean of scores, near": Preset(scores="qk+vv", combine="scores", neighbourhood=1.5, residual=False),
    "entmax, near": Preset(scores="kk", normalizer="entmax", neighbourhood=2.0, residual=False),
}


@pytest.mark.parametrize("name", [*PRESETS, *OWN])
def test_presets_against_their_formulas(name):
    preset = {**PRESETS, **OWN}[name]
    preset = replace(preset, layers=min(preset.layers, clips.DEPTH))
    model, x = clips.open_clip_vit(), clips.images()
    with torch.no_grad():
        found, want = dense_tokens(model, x, preset), slow_tokens(model, x, preset)
    assert found.num_prefix == 1 and found.grid == (4, 4)
    torch.testing.assert_close(found.tokens, want, atol=2e-5, rtol=2e-5)


def test_presets_differ_from_each_other():
    model, x = clips.open_clip_vit(), clips.images()
    with torch.no_grad():
        found = {
            n: dense_tokens(model, x, replace(p, layers=min(p.layers, 3))).map.flatten() for n, p in PRESETS.items()
        }
    pairs = [(a, b) for a in found for b in found if a < b]
    close = [(a, b) for a, b in pairs if torch.cosine_similarity(found[a], found[b], dim=0) > 0.9999]
    assert not close


# ---- hosts


@pytest.mark.parametrize("name", clips.CLIPS)
def test_clip_as_it_is_gives_the_hosts_own_embedding(name):
    """The class token's own is the image embedding; without one, a picture of a single patch is that patch."""
    model = clips.CLIPS[name]()
    with torch.no_grad():
        if name in clips.POOLS_BY_CLASS_TOKEN:
            x = clips.images()
            found = dense_tokens(model, x, "clip").tokens[:, 0]
        else:
            model, x = one_patch(name)
            found = dense_tokens(model, x, "clip").tokens[:, 0]
        torch.testing.assert_close(found, clips.encode_image(model, x), atol=1e-5, rtol=1e-4)


def one_patch(name):
    """The same kind of model, made for pictures of one patch."""
    before, clips.SIZE = clips.SIZE, clips.PATCH
    clips.TIMM["img_size"] = clips.SIZE
    try:
        return clips.CLIPS[name](), clips.images(2, clips.PATCH, clips.PATCH)
    finally:
        clips.SIZE = before
        clips.TIMM["img_size"] = before


@pytest.mark.parametrize("name", clips.CLIPS)
@pytest.mark.parametrize("preset", ["entmax-qq", "naclip", "gem", "sclip"])
def test_hosts_at_any_size(name, preset):
    model = clips.CLIPS[name]()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    preset = replace(PRESETS[preset], layers=min(PRESETS[preset].layers, clips.DEPTH))
    x = clips.images(1, 24, 56)
    with torch.no_grad():
        plain = clips.encode_image(model, clips.images())
        found = dense_tokens(model, x, preset)
        again = clips.encode_image(model, clips.images())
    assert found.map.shape[-2:] == (3, 7) and found.map.isfinite().all()
    assert torch.equal(plain, again)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    with torch.no_grad():
        other = dense_tokens(model, x, replace(PRESETS["clip"], layers=preset.layers))
    assert not torch.allclose(found.map, other.map, atol=1e-3)


def test_transformers_and_open_clip_agree():
    """The same weights in both libraries: the same dense features under every preset."""
    ours, theirs = clips.open_clip_vit(), clips.transformers_model("CLIP", intermediate_size=4 * clips.WIDTH)
    theirs.vision_model.load_state_dict(as_transformers(ours.visual, theirs.vision_model.state_dict()))
    theirs.visual_projection.weight.data = ours.visual.proj.data.T.clone()
    x = clips.images(1, 24, 40)
    for name in PRESETS:
        preset = replace(PRESETS[name], layers=min(PRESETS[name].layers, clips.DEPTH))
        with torch.no_grad():
            a, b = dense_tokens(ours, clips.images(), preset), dense_tokens(theirs, clips.images(), preset)
            torch.testing.assert_close(a.tokens, b.tokens, atol=3e-5, rtol=3e-5)
            assert dense_tokens(theirs, x, preset).grid == (3, 5)


def as_transformers(tower, keys):
    state = tower.state_dict()
    names = {
        "embeddings.class_embedding": "class_embedding",
        "embeddings.patch_embedding.weight": "conv1.weight",
        "embeddings.position_embedding.weight": "positional_embedding",
    }
    for end in ("weight", "bias"):
        names |= {f"pre_layrnorm.{end}": f"ln_pre.{end}", f"post_layernorm.{end}": f"ln_post.{end}"}
    out = {new: state[old] for new, old in names.items()}
    for i in range(clips.DEPTH):
        ours, theirs = f"transformer.resblocks.{i}", f"encoder.layers.{i}"
        for end in ("weight", "bias"):
            for part, piece in zip("qkv", state[f"{ours}.attn.in_proj_{end}"].chunk(3), strict=True):
                out[f"{theirs}.self_attn.{part}_proj.{end}"] = piece
            for new, old in {
                "self_attn.out_proj": "attn.out_proj",
                "layer_norm1": "ln_1",
                "layer_norm2": "ln_2",
                "mlp.fc1": "mlp.c_fc",
                "mlp.fc2": "mlp.c_proj",
            }.items():
                out[f"{theirs}.{new}.{end}"] = state[f"{ours}.{old}.{end}"]
    return out | {key: value for key, value in keys.items() if key.endswith("position_ids")}


def test_a_swap_of_the_users_stays_in_force_before_the_last_blocks():
    import selectivit as sv

    model, x = clips.open_clip_vit(), clips.images()
    with torch.no_grad():
        plain = dense_tokens(model, x, "entmax-qq").tokens
        with sv.swap_attention(model, alpha=1.5, layers=[0]) as swap:
            assert swap.replaced
            assert not torch.allclose(dense_tokens(model, x, "entmax-qq").tokens, plain, atol=1e-3)
        with sv.swap_attention(model, alpha=2.0, layers=[-1]):  # the preset says how the last block attends
            assert torch.equal(dense_tokens(model, x, "entmax-qq").tokens, plain)


def test_random_mask_differs_by_seed_and_temperature_sharpens():
    model, x = clips.open_clip_vit(), clips.images()
    base = Preset(normalizer="random_mask")
    with torch.no_grad():
        a, b, c = (dense_tokens(model, x, replace(base, seed=seed)).tokens for seed in (0, 0, 1))
        warm, cold = (dense_tokens(model, x, Preset(temperature=t)).tokens for t in (1.0, 0.5))
    assert torch.equal(a, b) and not torch.allclose(a, c, atol=1e-3)
    assert not torch.allclose(warm, cold, atol=1e-3)


def test_half_precision_follows_single_precision():
    model, x = clips.open_clip_vit(), clips.images()
    with torch.no_grad():
        want = dense_tokens(model, x, "naclip").map
        found = dense_tokens(model.to(torch.bfloat16), x, "naclip").map
    assert found.dtype == torch.bfloat16
    assert torch.cosine_similarity(found.float(), want, dim=1).min() > 0.99


def test_gradients_reach_the_image():
    model, x = clips.open_clip_vit(), clips.images().requires_grad_()
    dense_tokens(model, x, "selectivit").map.square().sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0


# ---- what is refused


def test_models_without_a_shared_space_are_refused():
    import timm
    from open_clip.coca_model import CoCa
    from open_clip.model import CLIP

    x = clips.images()
    cnn = CLIP(16, {"image_size": 32, "layers": [1, 1, 1, 1], "width": 8}, clips.TEXT)
    with pytest.raises(ValueError, match="no image tower of patches"):
        dense_tokens(cnn, x)
    with pytest.raises(ValueError, match="no text tower"):
        dense_tokens(timm.models.VisionTransformer(**clips.TIMM), x)
    with pytest.raises(ValueError, match="no text tower"):
        dense_tokens(clips.transformers_model("CLIP").vision_model, x)
    vision = clips.VISION | {"attentional_pool": True, "attn_pooler_heads": 2, "output_tokens": True}
    text = clips.TEXT | {"embed_cls": True, "output_tokens": True}
    with pytest.raises(ValueError, match="captions"):
        dense_tokens(CoCa(32, text, clips.TEXT, vision).eval(), x)
    with pytest.raises(ValueError, match="neither a visual projection nor a pooling head"):
        dense_tokens(clips.transformers_model("Siglip", vision_use_head=False), x)


@pytest.mark.parametrize("layers", [0, 7])
def test_layers_out_of_range(layers):
    with pytest.raises(ValueError, match="expected"):
        dense_tokens(clips.open_clip_vit(), clips.images(), replace(PRESETS["gem"], layers=layers))


def test_images_that_are_no_whole_patches():
    with pytest.raises(ValueError, match="multiples of 8"):
        dense_tokens(clips.open_clip_vit(), clips.images(1, 30, 32))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"scores": "xx"}, "score source"),
        ({"combine": "max"}, "combine"),
        ({"normalizer": "hardmax"}, "normalizer"),
        ({"window": 224}, "go together"),
        ({"window": 224, "stride": 448}, "gaps"),
        ({"two_streams": True, "scores": "qk"}, "two streams"),
        ({"threshold": 2.0}, "probability"),
        ({"neighbourhood": 0.0}, "above 0"),
    ],
)
def test_presets_say_what_is_wrong(options, text):
    with pytest.raises(ValueError, match=text):
        Preset(**options)
