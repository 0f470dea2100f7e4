"""The formulas of cost against torch's counter, real models, tracked memory, and the published ratios."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from selectivit.eval.cost import DINOV3, ViTShape, flop_ratio, veca_cost, vit_cost
from selectivit.models.veca import Veca
from selectivit.models.veca_config import SIZES, VecaConfig

SIDES = (256, 384, 512, 768, 1024, 2048)
REPORTED = {  # FLOPs of DINOv3 over VECA's, as published
    ("small", 64): (0.87, 1.08, 1.30, 1.85, 2.60, 7.66),
    ("base", 64): (0.84, 1.00, 1.13, 1.43, 1.81, 4.42),
    ("base", 8): (1.04, 1.12, 1.22, 1.49, 1.88, 4.54),
    ("large", 64): (0.84, 0.98, 1.08, 1.32, 1.61, 3.58),
}
SHAPE = VecaConfig(dim=32, depth=3, num_heads=2, hidden_dim=88, num_cores=12, patch_size=8, out_dim=10)


@pytest.mark.parametrize(("size", "budget"), REPORTED)
def test_the_ratios_are_the_published_ones(size, budget):
    for side, reported in zip(SIDES, REPORTED[size, budget], strict=True):
        assert abs(flop_ratio(size, SIZES[size], (side, side), budget) - reported) < 0.01


def counted(run):
    with torch.no_grad(), FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        run()
    return counter.get_total_flops()


@pytest.mark.parametrize("budget", [1, 5, 12])
@pytest.mark.parametrize("size", [(32, 48), (64, 8)])
def test_veca_as_torch_counts_it(budget, size):
    model, x = Veca(SHAPE).eval(), torch.randn(1, 3, *size)
    assert counted(lambda: model(x, budget)) == veca_cost(SHAPE, size, budget).flops


def test_a_plain_vit_as_torch_counts_it():
    timm = pytest.importorskip("timm")
    for size in DINOV3:
        with torch.device("meta"):
            model = timm.create_model(f"vit_{size}_patch16_dinov3", num_classes=0)
        assert sum(p.numel() for p in model.parameters()) == vit_cost(DINOV3[size], (256, 256)).parameters
    model = timm.create_model("vit_small_patch16_dinov3", num_classes=0, depth=2, dynamic_img_size=True).eval()
    found = counted(lambda: model.forward_features(torch.randn(1, 3, 64, 96)))
    assert found == vit_cost(ViTShape(384, 2, 6), (64, 96)).flops


@pytest.mark.parametrize("size", SIZES)
def test_parameters_of_the_named_sizes(size):
    with torch.device("meta"):
        model = Veca(SIZES[size])
    assert sum(p.numel() for p in model.parameters()) == veca_cost(SIZES[size], (256, 256)).parameters
    with_head = Veca(SHAPE)
    assert sum(p.numel() for p in with_head.parameters()) == veca_cost(SHAPE, (64, 64)).parameters


class Live(TorchDispatchMode):
    """The most bytes that live at once in storages made inside."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self.seen = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, torch.Tensor) and t.untyped_storage() not in self.seen:
                storage = t.untyped_storage()
                known = [a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)]
                if storage.data_ptr() in known:
                    continue
                self.seen[storage] = size = storage.nbytes()
                self.now += size
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self.freed, size)
        return out

    def freed(self, size):
        self.now -= size


def test_activations_as_they_live():
    model, x = Veca(SIZES["tiny"]).eval(), torch.randn(1, 3, 256, 256)
    with torch.no_grad():
        model(x)
        for budget in (64, 8):
            with Live() as live:
                model(x, budget)
            expected = veca_cost(SIZES["tiny"], (256, 256), budget).activation_bytes
            assert 0.85 * expected < live.most < 1.1 * expected


def test_what_is_refused():
    with pytest.raises(ValueError, match="budget of 1 to 64 cores, got 65"):
        veca_cost(SIZES["small"], (256, 256), 65)
    with pytest.raises(ValueError, match="whole patches of 16 px, got 250 x 256"):
        vit_cost(DINOV3["small"], (250, 256))
    padded = VecaConfig(pad=True)
    assert veca_cost(padded, (250, 250)) == veca_cost(padded, (256, 256))
