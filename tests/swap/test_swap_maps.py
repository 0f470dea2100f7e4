"""Attention maps: which layer, heads and rows, at what cost, and what is refused."""

from typing import Any

import pytest
import torch
from swap_hosts import HEADS, HOSTS, TokenEncoder, hf_vision, images, randomise, timm_vit
from torch import Tensor, nn

from selectivit.swap import maps as maps_module
from selectivit.swap.maps import attention_maps, available_memory
from selectivit.swap.swap import swap_attention


@pytest.fixture
def vit() -> nn.Module:
    return randomise(timm_vit())


@pytest.mark.parametrize("normalizer", ["softmax", "entmax", "sparsemax", "random_mask"])
@torch.no_grad()
def test_heads_and_rows_are_those_of_the_whole_map(vit: nn.Module, normalizer: str) -> None:
    x, alpha = images(), torch.tensor([1.3, 1.7])
    with swap_attention(vit, normalizer, alpha=alpha, scale=torch.tensor([0.4, 0.9]), layers=None):
        whole = attention_maps(vit, x, 1)
        assert whole.shape == (2, HEADS, 17, 17)
        for heads, queries in [(1, 0), ([1, 0], None), (None, [0, -1]), ([-1], slice(2, 9)), ([0, 1], range(17))]:
            found = attention_maps(vit, x, 1, heads=heads, queries=queries)
            expected = whole if heads is None else whole[:, [heads] if isinstance(heads, int) else heads]
            if queries is not None:
                rows = [queries] if isinstance(queries, int) else queries
                expected = expected[:, :, rows if isinstance(rows, slice) else list(rows)]
            torch.testing.assert_close(found, expected)
    assert found.dtype == torch.float32


@torch.no_grad()
def test_eager_transformers_agrees(vit: nn.Module) -> None:
    x = images()
    for family in ("Dinov2", "ViT", "DINOv3ViT"):
        model = randomise(hf_vision(family, "eager"))
        expected = model(pixel_values=x, output_attentions=True).attentions
        for layer in (0, 1, -1):
            torch.testing.assert_close(attention_maps(model, x, layer), expected[layer], atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_multihead_attention_agrees_with_its_own_weights() -> None:
    torch.manual_seed(0)
    model, x = nn.MultiheadAttention(16, 2, batch_first=True).eval(), torch.randn(2, 5, 16)

    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = model

        def forward(self, x: Tensor) -> Tensor:
            return self.attn(x, x, x)[0]

    _, expected = model(x, x, x, average_attn_weights=False)
    torch.testing.assert_close(attention_maps(Once(), x), expected)


@torch.no_grad()
def test_any_image_size(vit: nn.Module) -> None:
    found = attention_maps(vit, images(1, 40, 48))
    assert found.shape == (1, HEADS, 31, 31)
    torch.testing.assert_close(found.sum(-1), torch.ones(1, HEADS, 31))


@torch.no_grad()
def test_a_hybrid_is_read_at_its_own_size() -> None:
    import timm

    sizes = {"img_size": 64, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 0}
    model = timm.create_model("vit_tiny_r_s16_p8_224", **sizes).eval()
    found = attention_maps(model, images(1, 64, 64), 0)
    tokens = model.patch_embed.num_patches + 1
    assert found.shape == (1, 2, tokens, tokens)
    torch.testing.assert_close(found.sum(-1), torch.ones(1, 2, tokens))


@torch.no_grad()
def test_layers_count_from_both_ends(vit: nn.Module) -> None:
    x = images()
    assert torch.equal(attention_maps(vit, x, 2), attention_maps(vit, x))
    assert not torch.equal(attention_maps(vit, x, 0), attention_maps(vit, x, 1))


def test_gradients_reach_the_maps(vit: nn.Module) -> None:
    x = images(1).requires_grad_()
    attention_maps(vit, x)[..., 0, 1].sum().backward()
    assert x.grad is not None and x.grad.abs().max() > 0
    with torch.no_grad():
        assert not attention_maps(vit, x).requires_grad


@torch.no_grad()
def test_sums_of_score_sources(vit: nn.Module) -> None:
    x = images()
    with swap_attention(vit, scores="qq+kk", combine="sum"):
        total = attention_maps(vit, x)
    with swap_attention(vit, scores="qq+kk"):
        torch.testing.assert_close(attention_maps(vit, x) * 2, total)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"layer": 3}, r"layer=3 is out of range: this model has 3 attention layers, 0 to 2"),
        ({"layer": -4}, r"layer=-4"),
        ({"layer": True}, r"layer=True"),
        ({"heads": 2}, r"heads=2: expected some of 0 to 1"),
        ({"heads": []}, r"heads=\[\]"),
        ({"queries": [17]}, r"queries=\[17\]: expected some of 0 to 16"),
    ],
)
def test_what_is_not_there(vit: nn.Module, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        attention_maps(vit, images(), **options)
    assert not any("_selective" in vars(module) for module in vit.modules())


def test_models_without_attention() -> None:
    with pytest.raises(ValueError, match="no attention found in Linear"):
        attention_maps(nn.Linear(2, 2), torch.ones(1, 2))


def test_a_map_too_large_is_refused_in_words(vit: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maps_module, "available_memory", lambda device: 3 * 4 * 2 * 2 * 17 * 17 - 1)
    with pytest.raises(MemoryError, match=r"\(2, 2, 17, 17\).*heads=\[0\].*queries=\[0\]"):
        attention_maps(vit, images())
    assert attention_maps(vit, images(), heads=[0]).shape == (2, 1, 17, 17)
    assert attention_maps(vit, images(), queries=[0]).shape == (2, 2, 1, 17)
    with swap_attention(vit, "random_mask"), pytest.raises(MemoryError):
        attention_maps(vit, images(), heads=[0])  # all heads' masks are drawn at once
    monkeypatch.setattr(maps_module, "available_memory", lambda device: None)
    assert attention_maps(vit, images()).shape == (2, 2, 17, 17)


def test_available_memory_is_said_by_the_system() -> None:
    free = available_memory(torch.device("cpu"))
    assert free is None or free > 2**20
    assert available_memory(torch.device("meta")) is None


def test_a_layer_that_attends_twice_has_no_one_map() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.layer(x))

    with pytest.raises(ValueError, match="once a forward, it did 2 times"):
        attention_maps(Twice().eval(), torch.randn(1, 4, 16))


@torch.no_grad()
def test_compiled_models_are_read_eagerly() -> None:
    model, x = randomise(TokenEncoder()), images()
    expected = attention_maps(model, x)
    host = HOSTS["timm ViT"]
    vit = randomise(host.build())
    wanted = attention_maps(vit, x)
    torch.compiler.reset()
    compiled: Any = torch.compile(model, backend="aot_eager")
    compiled_vit: Any = torch.compile(vit, backend="aot_eager")
    before = compiled_vit(x)
    torch.testing.assert_close(attention_maps(compiled, x), expected)
    torch.testing.assert_close(attention_maps(compiled_vit, x), wanted)
    torch.testing.assert_close(compiled_vit(x), before)
    torch.compiler.reset()
