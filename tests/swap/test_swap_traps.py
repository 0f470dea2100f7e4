"""What is known to go wrong when attention is replaced: fast paths, mask polarity, causal text, compilation."""

import copy
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from swap_hosts import (
    HEADS,
    HOSTS,
    WIDTH,
    TokenEncoder,
    hf_both,
    hf_forward,
    hf_text,
    hf_vision,
    images,
    known_to,
    randomise,
    timm_dinov3,
    timm_eva,
    timm_vit,
)
from torch import Tensor, nn

from selectivit.swap.attend import STATE
from selectivit.swap.record import recording
from selectivit.swap.sites import find_sites
from selectivit.swap.swap import swap_attention

NO_GRAD = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


# --- torch's fast paths -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", list(NO_GRAD))
@pytest.mark.parametrize("name", ["open_clip CLIP", "torchvision ViT", "nn.TransformerEncoder"])
def test_native_fast_paths_do_not_pass_by_the_swap(name: str, mode: str) -> None:
    host = HOSTS[name]
    model, x = randomise(host.build()), images()
    with NO_GRAD[mode]():
        before = host.forward(model, x)
        with swap_attention(model, scores="kk") as swap, recording(swap.sites) as calls:
            assert (host.forward(model, x) - before).abs().max() > 1e-2
        assert [len(found) for found in calls.values()] == [1]
        assert torch.equal(host.forward(model, x), before)


@pytest.mark.parametrize("layers", [None, -1, [0]])
@torch.no_grad()
def test_padded_batches_that_the_encoder_packs_as_nested(layers) -> None:
    model, x = randomise(TokenEncoder()), images(3)
    padding = torch.zeros(3, 16, dtype=torch.bool)
    padding[0, 10:], padding[2, 3:] = True, True
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors")
        before = model(x, padding)
        assert (before[0, 10:] == 0).all()  # the encoder's nested path: what was padded comes back as zeros
        with swap_attention(model, "softmax", layers=layers):
            close(model(x, padding), before)
        with swap_attention(model, alpha=1.5, layers=layers):
            swapped = model(x, padding)
            alone = model(x[:1, :, :, :])  # without padding, other tokens count
        assert not torch.allclose(swapped[0, :10], before[0, :10], atol=1e-3)
        assert not torch.allclose(swapped[0, :10], alone[0, :10], atol=1e-3)
        assert torch.equal(model(x, padding), before)


# --- nn.MultiheadAttention, every way it can be called -----------------------------------------------------------


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    batch_first=st.booleans(),
    batched=st.booleans(),
    bias=st.booleans(),
    mask=st.sampled_from([None, "bool", "float", "per head"]),
    padding=st.sampled_from([None, "bool", "float"]),
    need_weights=st.booleans(),
    average=st.booleans(),
    extra=st.sampled_from(["", "bias_kv", "zero", "both"]),
    widths=st.sampled_from([{}, {"kdim": 12}, {"kdim": 12, "vdim": 20}]),
    cross=st.booleans(),
    training=st.booleans(),
)
def test_multihead_attention_with_softmax_is_torchs(
    batch_first: bool, batched: bool, bias: bool, mask, padding, need_weights, average, extra, widths, cross, training
) -> None:
    torch.manual_seed(0)
    more = {"add_bias_kv": extra in ("bias_kv", "both"), "add_zero_attn": extra in ("zero", "both")}
    model = nn.MultiheadAttention(16, 2, bias=bias, batch_first=batch_first, **more, **widths).train(training)
    length, keys, batch = 5, 7 if cross or widths else 5, 3 if batched else 1

    def sequence(count: int, width: int) -> Tensor:
        if not batched:
            return torch.randn(count, width)
        return torch.randn(batch, count, width) if batch_first else torch.randn(count, batch, width)

    query = sequence(length, 16)
    same = not cross and not widths
    key = query if same else sequence(keys, widths.get("kdim", 16))
    value = query if same else sequence(keys, widths.get("vdim", 16))
    options: dict[str, Any] = {"need_weights": need_weights, "average_attn_weights": average}
    if mask:
        shape = (batch * 2, length, keys) if mask == "per head" else (length, keys)
        hidden = torch.rand(shape) < 0.3
        hidden[..., 0] = False
        options["attn_mask"] = torch.randn(shape) if mask == "float" else hidden
    if padding:
        hidden = torch.zeros(batch, keys, dtype=torch.bool)
        hidden[0, -2:] = True
        hidden = hidden if batched else hidden[0]
        both_float = padding == "float" or mask == "float"
        options["key_padding_mask"] = (
            torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf) if both_float else hidden
        )
        if mask == "bool" and padding == "float":
            options["key_padding_mask"] = hidden
    if mask == "per head" and padding == "float":
        options["key_padding_mask"] = hidden
    expected = model(query, key, value, **options)
    with swap_attention(model, "softmax"):
        found = model(query, key, value, **options)
    close(found[0], expected[0])
    assert (found[1] is None) == (expected[1] is None)
    if expected[1] is not None:
        close(found[1], expected[1])


@torch.no_grad()
def test_multihead_attention_masks_are_true_where_masked() -> None:
    torch.manual_seed(0)
    model, x = nn.MultiheadAttention(16, 2, batch_first=True).eval(), torch.randn(1, 6, 16)
    hidden = torch.zeros(1, 6, dtype=torch.bool)
    hidden[:, 4:] = True
    with swap_attention(model, alpha=1.5):
        out, weights = model(x, x, x, key_padding_mask=hidden)
        short, _ = model(x, x[:, :4], x[:, :4])
    close(out, short)
    assert weights is not None and (weights[..., 4:] == 0).all()


def test_multihead_attention_says_what_is_wrong() -> None:
    model, x = nn.MultiheadAttention(16, 2, batch_first=True), torch.randn(2, 6, 16)
    with swap_attention(model, scores="kk"):
        with pytest.raises(ValueError, match=r"6 queries and 4 keys"):
            model(x, x[:, :4], x[:, :4])
        with pytest.raises(ValueError, match=r"attn_mask has shape \(6, 5\), expected \(6, 6\)"):
            model(x, x, x, attn_mask=torch.zeros(6, 5))
        with pytest.raises(ValueError, match=r"key_padding_mask has shape \(2, 5\)"):
            model(x, x, x, key_padding_mask=torch.zeros(2, 5, dtype=torch.bool))
        with pytest.raises(RuntimeError, match="expected attn_mask"):
            model(x, x, x, is_causal=True)


@torch.no_grad()
def test_cross_attention_takes_qk_alone() -> None:
    torch.manual_seed(0)
    model = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2, 32, batch_first=True), 2).eval()
    x, memory = torch.randn(1, 5, 16), torch.randn(1, 7, 16)
    before = model(x, memory)
    with swap_attention(model, "softmax", layers=None) as swap:
        assert len(swap.replaced) == 4
        close(model(x, memory), before)
    with swap_attention(model, scores="qq", layers=None) as swap:
        assert swap.replaced == ("layers.0.self_attn", "layers.1.self_attn")
        assert "cross-attention" in swap.skipped["layers.1.multihead_attn"]
        assert not torch.allclose(model(x, memory), before)
    with pytest.raises(ValueError, match="cross-attention"):
        swap_attention(model, scores="qq")


# --- masks of the other hosts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bool", "float", "per head"])
@torch.no_grad()
def test_open_clips_own_masks_are_true_where_masked(kind: str) -> None:
    from open_clip.transformer import Attention

    torch.manual_seed(0)
    model, x = Attention(16, 2).eval(), torch.randn(2, 6, 16)
    mask = torch.ones(6, 6, dtype=torch.bool).triu(1)
    if kind == "float":
        mask = torch.zeros(6, 6).masked_fill(mask, -torch.inf)
    if kind == "per head":
        mask = mask.expand(4, 6, 6)
    expected = model(x, attn_mask=mask)
    with swap_attention(model, "softmax"):
        close(model(x, attn_mask=mask), expected)
    with swap_attention(model, alpha=1.5):
        out = model(x, attn_mask=mask)
        changed = x.clone()
        changed[:, 4:] += 1
        assert torch.equal(model(changed, attn_mask=mask)[:, :4], out[:, :4])  # nobody sees ahead


@pytest.mark.parametrize("build", [timm_vit, timm_eva, lambda: timm_eva(attn_type="rope", qk_norm=True)])
@pytest.mark.parametrize("fused", [True, False])
@torch.no_grad()
def test_timms_masks_causality_and_unfused_modules(build, fused: bool) -> None:
    torch.manual_seed(0)
    model, x = randomise(build()), images()
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = fused
    mask = torch.rand(17, 17) < 0.7
    mask[:, 0] = True
    for options in ({"attn_mask": mask}, {"attn_mask": torch.randn(17, 17)}, {"is_causal": True}):
        expected = model.forward_features(x, **options)
        assert not torch.allclose(expected, model.forward_features(x), atol=1e-3)
        with swap_attention(model, "softmax", layers=None):
            close(model.forward_features(x, **options), expected)
    with swap_attention(model, layers=None), pytest.raises(ValueError, match="got both"):
        model.forward_features(x, attn_mask=mask, is_causal=True)


def attention_of(kind: str) -> nn.Module:
    from timm.layers.attention import Attention, AttentionRope
    from timm.models.eva import EvaAttention

    grouped = known_to(AttentionRope, num_kv_heads=2)
    norm = {"norm_layer": nn.LayerNorm, "qk_norm": True, "scale_norm": True} | known_to(AttentionRope, gated=True)
    return {
        "attention": lambda: Attention(WIDTH, HEADS, qkv_bias=True, attn_head_dim=8, dim_out=24, **norm),
        "rope grouped": lambda: AttentionRope(WIDTH, 4, qkv_fused=False, rotate_half=True, **grouped, **norm),
        "rope prefix": lambda: AttentionRope(WIDTH, HEADS, num_prefix_tokens=3, **norm),
        "eva": lambda: EvaAttention(WIDTH, HEADS, num_prefix_tokens=3, **norm),
        "eva separate bias": lambda: EvaAttention(WIDTH, HEADS, qkv_bias_separate=True, **norm),
        "eva no bias": lambda: EvaAttention(WIDTH, HEADS, qkv_bias=False, norm_layer=nn.LayerNorm),
        "eva unfused": lambda: EvaAttention(WIDTH, HEADS, qkv_fused=False, **norm),
    }[kind]()


@pytest.mark.parametrize(
    "kind", ["attention", "rope grouped", "rope prefix", "eva", "eva separate bias", "eva no bias", "eva unfused"]
)
@torch.no_grad()
def test_timms_modules_with_every_option(kind: str) -> None:
    module = randomise(attention_of(kind))
    prefix = getattr(module, "num_prefix_tokens", 0)
    x = torch.randn(2, prefix + 6, WIDTH, generator=torch.Generator().manual_seed(0))
    ropes: list[dict[str, Tensor]] = [{}]
    if prefix:
        width = WIDTH // (4 if kind == "rope grouped" else HEADS)
        ropes.append({"rope": torch.randn(6, 2 * width, generator=torch.Generator().manual_seed(1))})
    for options in ropes:
        expected = module(x, **options)
        with swap_attention(module, "softmax"):
            close(module(x, **options), expected)
    if prefix:
        assert not torch.allclose(module(x, **ropes[1]), module(x))
        with swap_attention(module, "softmax") as swap, recording(swap.sites) as calls:
            module(x, **ropes[1])
            module(x)
        turned, plain = calls[""]
        assert torch.equal(turned.q[:, :, :prefix], plain.q[:, :, :prefix])  # no rotation before the patches
        assert not torch.allclose(turned.q[:, :, prefix:], plain.q[:, :, prefix:])
        assert torch.equal(turned.v, plain.v)


def test_attention_dropout_stays_in_training() -> None:
    model, x = randomise(timm_vit(attn_drop_rate=0.5)).train(), images()
    for normalizer in ("softmax", "entmax"):
        with swap_attention(model, normalizer, layers=None):
            torch.manual_seed(0)
            first = model(x)
            torch.manual_seed(1)
            assert not torch.allclose(model(x), first)
            torch.manual_seed(0)
            assert torch.equal(model(x), first)
    torch.manual_seed(0)
    expected = model(x)
    with swap_attention(model, "softmax", layers=None):
        torch.manual_seed(0)
        close(model(x), expected)


# --- transformers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["CLIP", "Siglip", "Siglip2"])
@torch.no_grad()
def test_text_stays_causal_whatever_the_swap(family: str) -> None:
    host = HOSTS[
        {"CLIP": "transformers CLIP", "Siglip": "transformers SigLIP", "Siglip2": "transformers SigLIP 2"}[family]
    ]
    model = randomise(hf_both(family))
    before = hf_text(model)
    with swap_attention(model, layers=None):
        host.forward(model, images())
        assert torch.equal(hf_text(model), before)


@torch.no_grad()
def test_our_name_has_a_mask_function_too() -> None:
    # Even a text tower that is told to use our name, against advice, stays causal.
    from transformers import CLIPTextConfig, CLIPTextModel
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from selectivit.ops.selective import SOFTMAX
    from selectivit.swap.attend import Selective

    config = CLIPTextConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    config.vocab_size, config.max_position_embeddings = 50, 8
    model = randomise(CLIPTextModel._from_config(config, attn_implementation="sdpa"))
    find_sites(hf_vision("ViT"))  # registers the name
    assert "selectivit" in ALL_ATTENTION_FUNCTIONS
    ids = torch.arange(8)[None] + 1
    before = model(input_ids=ids).last_hidden_state
    model.config._attn_implementation = "selectivit"
    for layer in model.encoder.layers:
        setattr(layer.self_attn, STATE, Selective(SOFTMAX, host="sdpa"))
    close(model(input_ids=ids).last_hidden_state, before)
    padded = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]])
    found = model(input_ids=ids, attention_mask=padded).last_hidden_state
    model.config._attn_implementation = "sdpa"
    close(found[:, 2:], model(input_ids=ids, attention_mask=padded).last_hidden_state[:, 2:])


@torch.no_grad()
def test_eager_models_keep_a_full_tuple_of_attentions() -> None:
    model, x = randomise(hf_vision("Dinov2", "eager")), images()
    before = model(pixel_values=x, output_attentions=True)
    with swap_attention(model, alpha=1.5, layers=[1]):
        after = model(pixel_values=x, output_attentions=True)
    assert len(before.attentions) == len(after.attentions) == 3
    close(after.attentions[0], before.attentions[0])
    assert (after.attentions[1] == 0).any() and not (before.attentions[1] == 0).any()
    with swap_attention(model, "softmax", layers=None):
        close(model(pixel_values=x, output_attentions=True).attentions[2], before.attentions[2])


@torch.no_grad()
def test_configurations_are_shared_again_after_restore() -> None:
    model = hf_both("CLIP")
    shared = model.vision_model.config
    with swap_attention(model, layers=[0]) as swap:
        first, second = (model.vision_model.encoder.layers[index].self_attn for index in (0, 1))
        assert swap.replaced == ("vision_model.encoder.layers.0.self_attn",)
        assert first.config._attn_implementation == "selectivit"
        assert second.config is shared and shared._attn_implementation == "sdpa"
        assert model.config.text_config._attn_implementation == "sdpa"
    assert first.config is shared


@torch.no_grad()
def test_a_mask_for_padding_is_kept() -> None:
    from swap_hosts import siglip2_inputs

    model, x = randomise(hf_both("Siglip2")), images()
    inputs = siglip2_inputs(x)
    inputs["pixel_attention_mask"][:, 12:] = 0
    expected = model.get_image_features(**inputs).pooler_output
    with swap_attention(model, "softmax", layers=None):
        close(model.get_image_features(**inputs).pooler_output, expected)
    with swap_attention(model, layers=None) as swap, recording(swap.sites) as calls:
        model.get_image_features(**inputs)
    mask = calls[swap.replaced[0]][0].attn_mask
    assert mask is not None and not mask[..., 12:].any()


# --- recording ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(HOSTS))
@torch.no_grad()
def test_recording_leaves_the_output_alone(name: str) -> None:
    host = HOSTS[name]
    model, x = randomise(host.build()), images()
    before = host.forward(model, x)
    sites, _ = find_sites(model)
    with recording(sites) as calls:
        found = host.forward(model, x)
    if find_sites(model)[0][0].host == "torch":  # torch's native kernel, our q, k and v
        close(found, before)
    else:
        assert torch.equal(found, before)
    assert [len(call) for call in calls.values()] == [1, 1, 1]
    assert all(call[0].rule.normalizer == "softmax" for call in calls.values())
    assert torch.equal(host.forward(model, x), before)
    with swap_attention(model, alpha=1.5, layers=-1) as swap:
        swapped = host.forward(model, x)
        with recording(swap.sites) as calls:
            assert torch.equal(host.forward(model, x), swapped)
        assert calls[swap.replaced[0]][0].rule.alpha == 1.5


# --- compilation -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["timm ViT", "open_clip custom blocks", "transformers DINOv2", "torchvision ViT"])
def test_compiled_models(name: str) -> None:
    host = HOSTS[name]
    model, x = randomise(host.build()), images()
    with torch.no_grad():
        plain = host.forward(model, x)
        with swap_attention(model, alpha=1.5, layers=None):
            swapped = host.forward(model, x)
        torch.compiler.reset()
        compiled: Any = torch.compile(lambda x: host.forward(model, x), backend="aot_eager")
        close(compiled(x), plain)
        with swap_attention(model, alpha=1.5, layers=None):  # after the compilation
            close(compiled(x), swapped)
        close(compiled(x), plain)
    torch.compiler.reset()


@torch.no_grad()
def test_a_compiled_module_is_swapped_inside() -> None:
    model, x = randomise(timm_dinov3()), images()
    with swap_attention(model, alpha=1.5):
        swapped = model(x)
    torch.compiler.reset()
    compiled: Any = torch.compile(model, backend="aot_eager")
    with swap_attention(compiled, alpha=1.5) as swap:
        assert swap.replaced == ("blocks.2.attn",)
        close(compiled(x), swapped)
    torch.compiler.reset()


@pytest.mark.slow
def test_compiled_by_inductor_with_gradients() -> None:
    model, x = randomise(timm_vit()), images()
    reference = copy.deepcopy(model)
    torch.compiler.reset()
    with swap_attention(model, alpha=1.5, layers=None), swap_attention(reference, alpha=1.5, layers=None):
        compiled: Any = torch.compile(model)
        found, expected = compiled(x), reference(x)
        close(found, expected, 1e-4)
        found.sum().backward()
        expected.sum().backward()
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        close(one.grad, other.grad, 1e-3)
    torch.compiler.reset()


def test_layer_scale_at_its_start_hides_a_swap() -> None:
    # Why the models of these tests have layer scales of 1.
    torch.manual_seed(0)
    model, x = hf_vision("Dinov2", layerscale_value=1e-5).eval(), images()
    with torch.no_grad():
        before = hf_forward(model, x)
        with swap_attention(model, scores="kk"):
            assert (hf_forward(model, x) - before).abs().max() < 1e-4
