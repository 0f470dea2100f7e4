import io

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from selectivit.vis.attention import draw_attention, patch_weights, weight_scale
from selectivit.vis.compare import Variant, compare_figure, to_png
from selectivit.vis.curves import draw_curves
from selectivit.vis.statistics import AttentionStatistics


def variant(title, seed, grid=(5, 7), layers=3):
    generator = torch.Generator().manual_seed(seed)
    stats = [AttentionStatistics(36, *(1 + 30 * torch.rand(3, 4, generator=generator).double())) for _ in range(layers)]
    weights = torch.rand(2, *grid, generator=generator)
    return Variant(title, torch.randn(8, *grid, generator=generator), weights[0], weights[1], stats)


PHOTO = torch.rand(5 * 14, 7 * 14, 3, generator=torch.Generator().manual_seed(0))


def pixels(png):
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(int)


def test_the_figure_is_a_png_of_sensible_size_and_the_same_each_time():
    first, second = (to_png(compare_figure(PHOTO, [variant("softmax", 0), variant("entmax", 1)], (2, 3))) for _ in "ab")
    assert first == second
    height, width, _ = pixels(first).shape
    assert 1000 < width < 2500 and 600 < height < 2500 and len(first) < 2_000_000


def test_every_panel_is_there():
    figure = compare_figure(PHOTO, [variant("softmax", 0), variant("entmax 1.5", 1)], (2, 3), title="a photo")
    titles = {axes.get_title() for axes in figure.axes}
    for words in ("query patch", "joint PCA", "CLS", "marked patch", "support", "effective tokens"):
        assert any(words in title for title in titles), words
    assert {axes.get_ylabel() for axes in figure.axes} >= {"softmax", "entmax 1.5"}


def test_no_global_figure_is_left():
    import matplotlib.pyplot

    compare_figure(PHOTO, [variant("softmax", 0)], (0, 0))
    assert matplotlib.pyplot.get_fignums() == []


def test_zeros_look_unlike_the_smallest_weight():
    """In the rendered picture a zero is grey and pale, the smallest weight coloured and dark."""
    weights = torch.tensor([[0.0, 1e-9], [1e-3, 1.0]])
    figure = Figure(figsize=(2, 2), dpi=100)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.axis("off")
    draw_attention(axes, torch.full((20, 20, 3), 0.5), weights, weight_scale(weights))
    image = pixels(to_png(figure))
    zero, tiny, small, large = image[50, 50], image[50, 150], image[150, 50], image[150, 150]
    assert np.ptp(zero) <= 2 and np.ptp(tiny) > 40 and np.ptp(small) > 40 and np.ptp(large) > 40
    assert zero.mean() - tiny.mean() > 60
    assert abs(tiny - large).max() > 100


def test_one_scale_serves_both_variants():
    norm = weight_scale(torch.tensor([0.0, 0.2]), torch.tensor([0.5]), decades=2)
    assert norm.vmax == pytest.approx(0.5) and norm.vmin == pytest.approx(0.005)


def test_weights_that_are_all_zero_are_drawn():
    nothing = torch.zeros(2, 2)
    draw_attention(Figure().subplots(), PHOTO, nothing, weight_scale(nothing))


def test_prefix_tokens_are_left_out():
    assert patch_weights(torch.arange(11).expand(2, 11), (2, 3)).tolist() == [[[5, 6, 7], [8, 9, 10]]] * 2
    with pytest.raises(ValueError, match="2 x 3 = 6 patches, got 5"):
        patch_weights(torch.zeros(5), (2, 3))


def test_long_and_flat_photos_fit():
    for height, width in ((20, 400), (400, 20)):
        photo = torch.rand(height, width, 3)
        assert len(to_png(compare_figure(photo, [variant("softmax", 0, (1, 20))], (0, 0)))) > 1000


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match=r"5 rows and 7 columns.*\(5, 0\)"):
        compare_figure(PHOTO, [variant("softmax", 0)], (5, 0))
    with pytest.raises(ValueError, match="at least one variant"):
        compare_figure(PHOTO, [], (0, 0))
    with pytest.raises(ValueError, match="at least one layer"):
        draw_curves(Figure(), {"softmax": []})
