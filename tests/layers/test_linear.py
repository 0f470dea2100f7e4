"""Linear layers that something listens to, changes or stands in for: whatever it adds takes part."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from selectivit.layers.linear import is_bare
from selectivit.models.veca import Veca, VecaConfig

LAYERS = ("attn.qkv", "attn.proj", "ffn.fc1", "ffn.fc2")


class Adapted(nn.Module):
    """As adapter libraries do it: weight and bias are the base layer's, the forward adds to it."""

    def __init__(self, base):
        super().__init__()
        self.base, self.weight, self.bias = base, base.weight, base.bias
        rows, columns = torch.arange(base.in_features), torch.arange(base.out_features)
        self.low = nn.Parameter(rows.sin()[:, None] * columns.cos())

    def forward(self, x):
        return self.base(x) + x @ self.low


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Veca(VecaConfig(dim=32, depth=2, num_heads=2, hidden_dim=40, num_cores=8, patch_size=8)).eval()


def output(model, seed=1):
    out = model(torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(seed)))
    return torch.cat([out.cores, out.patch_tokens], 1).detach()


def replaced(model, path, make):
    changed = copy.deepcopy(model)
    parent, name = changed.blocks[0].get_submodule(path.split(".")[0]), path.split(".")[1]
    setattr(parent, name, make(getattr(parent, name)))
    return changed


def doubled(base):
    layer = Doubled(base.in_features, base.out_features)
    layer.load_state_dict(base.state_dict())
    return layer


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("path", LAYERS)
@pytest.mark.parametrize("make", [Adapted, doubled])
def test_what_stands_in_for_a_layer_takes_part(model, path, make, grad):
    with torch.set_grad_enabled(grad):
        changed = replaced(model, path, make)
        plain = replaced(model, path, lambda base: nn.Sequential(make(base)))
        assert (output(changed) - output(model)).abs().max() > 1e-3
        torch.testing.assert_close(output(changed), output(plain))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("everywhere", [False, True])
def test_hooks_see_every_linear_layer_and_may_change_it(model, grad, everywhere):
    seen = set()

    def hook(module, _, out):
        if isinstance(module, nn.Linear):
            seen.add(module)
            return out + 1
        return None

    linears = {module for module in model.modules() if isinstance(module, nn.Linear)}
    with torch.set_grad_enabled(grad):
        before = output(model)
        if everywhere:
            handles = [nn.modules.module.register_module_forward_hook(hook)]
        else:
            handles = [layer.register_forward_hook(hook) for layer in linears]
        try:
            assert (output(model) - before).abs().max() > 1e-2 and seen == linears
        finally:
            for handle in handles:
                handle.remove()
        assert torch.equal(output(model), before)


@torch.no_grad()
def test_a_forward_set_on_a_layer_is_used(model):
    before, layer = output(model), model.blocks[0].ffn.fc1
    layer.forward = lambda x: torch.zeros(*x.shape[:-1], 80)
    assert (output(model) - before).abs().max() > 1e-3
    del layer.forward
    assert torch.equal(output(model), before)


@torch.no_grad()
def test_changed_weights_and_layers_without_bias(model):
    expected = output(model)
    for path in LAYERS:
        normed = replaced(model, path, parametrizations.weight_norm)
        torch.testing.assert_close(output(normed), expected)
        halved = replaced(model, path, lambda base: prune.l1_unstructured(base, "weight", 0.5))
        bare = replaced(model, path, lambda base: base)
        bare.blocks[0].get_submodule(path).weight.mul_(halved.blocks[0].get_submodule(path).weight_mask)
        torch.testing.assert_close(output(halved), output(bare))
        without = replaced(model, path, lambda base: nn.Linear(base.in_features, base.out_features, bias=False))
        assert output(without).isfinite().all()


def test_when_a_layer_is_bare():
    layer = nn.Linear(2, 2)
    assert is_bare(layer) and not is_bare(nn.Linear(2, 2, bias=False)) and not is_bare(Doubled(2, 2))
    handle = layer.register_full_backward_hook(lambda *_: None)
    assert not is_bare(layer)
    handle.remove()
    assert is_bare(layer)
