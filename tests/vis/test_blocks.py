"""Panels over the blocks, and maps of tokens: what is drawn is what was given."""

import pytest
import torch

from selectivit.vis.blocks import Line, Panel, blocks_figure
from selectivit.vis.compare import to_png
from selectivit.vis.statistics import AttentionStatistics, weight_statistics
from selectivit.vis.token_maps import ScoreMaps, TokenMaps, point_figure, token_figure


def test_a_panel_draws_each_line_its_band_and_the_level_of_chance():
    lines = [Line("a$b", [1.0, 2.0, 3.0], [0.5, 1.5, 2.5], [1.5, 2.5, 3.5], 0.25), Line("b", [3.0, 2.0], level=0.25)]
    figure = blocks_figure([Panel("norm", "median", lines), Panel("CLS", "cosine", [Line("a$b", ()), Line("b", ())])])
    norm, cls = figure.axes
    drawn = [list(line.get_ydata()) for line in norm.lines]
    assert drawn[:2] == [[1, 2, 3], [3, 2]] and list(drawn[2]) == [0.25, 0.25] and len(drawn) == 3
    assert len(norm.collections) == 1 and not cls.lines and cls.texts[0].get_text() == "no model here has it"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a$b", "b"]
    assert to_png(figure).startswith(b"\x89PNG")


def test_many_checkpoints_get_shades_in_their_order_and_no_bands():
    lines = [Line(f"step {i}", [float(i)], [0.0], [9.0]) for i in range(8)]
    (axes,) = blocks_figure([Panel("norm", "", lines)]).axes
    colours = [line.get_color() for line in axes.lines]
    assert len(set(colours)) == 8 and not axes.collections


def test_a_share_that_is_nowhere_is_drawn_at_the_bottom():
    (axes,) = blocks_figure([Panel("outliers", "%", [Line("a", [0.0, 0.0])])]).axes
    assert axes.get_ylim() == (0, 1)


def test_nothing_to_draw_is_refused():
    for panels in ([], [Panel("a", "b", [])], [Panel("a", "b", [Line("x", ())])]):
        with pytest.raises(ValueError, match="at least one"):
            blocks_figure(panels)


def maps(label, blocks=("block 0", "block 1"), similarity=None):
    mask = torch.zeros(2, 3, dtype=torch.bool)
    mask[1, 2] = True
    return TokenMaps(label, {b: torch.randn(8, 2, 3) for b in blocks}, torch.rand(2, 3), mask, similarity)


def test_maps_of_tokens_frame_the_outliers():
    figure = token_figure(torch.rand(28, 42, 3), [maps("a", similarity=torch.rand(2, 3)), maps("b")], title="$x")
    titles = [axes.get_title() for axes in figure.axes]
    assert titles.count("norms, 1 outliers") == 2 and titles.count("cosine to CLS") == 1
    (frame,) = figure.axes[3].patches  # of the last patch, 14 px wide
    assert frame.get_xy() == (28, 14) and (frame.get_width(), frame.get_height()) == (14, 14)
    assert any(text.get_text() == "no class token" for axes in figure.axes for text in axes.texts)
    assert to_png(figure).startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="equally many"):
        token_figure(torch.rand(28, 42, 3), [maps("a"), maps("b", ("block 0",))])


def test_the_best_patch_is_marked_and_the_boxes_are_drawn():
    scores = torch.zeros(2, 3)
    scores[1, 0] = 1.0
    row = ScoreMaps("a", {"block 0": scores, "block 1": -scores}, [True, False])
    figure = point_figure(torch.rand(28, 42, 3), torch.tensor([[1.0, 14.0, 13.0, 28.0]]), [row])
    _, first, second = figure.axes[:3]
    assert [list(first.lines[0].get_xdata()), list(first.lines[0].get_ydata())] == [[7], [21]]
    assert first.get_title() == "block 0: in the box" and second.get_title() == "block 1: outside"
    assert [p.get_xy() for p in first.patches] == [(1, 14)] * 2 and first.patches[0].get_width() == 12
    with pytest.raises(ValueError, match="at least one row"):
        point_figure(torch.rand(28, 42, 3), torch.zeros(0, 4), [])


def test_statistics_of_weights_that_are_at_hand():
    weights = torch.tensor([[0.5, 0.25, 0.25, 0.0], [2.0, 0.0, 0.0, 0.0]])[None, None]  # the second row sums to 2
    found = weight_statistics(weights)
    assert isinstance(found, AttentionStatistics) and found.num_tokens == 4
    assert found.support_size.item() == 2 and found.entropy.item() == pytest.approx(1.5 * 0.6931472 / 2, abs=1e-6)
