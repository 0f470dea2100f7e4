"""Pictures of cores, and their numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb

from selectivit.vis.budget_maps import budget_maps_figure
from selectivit.vis.compare import to_png
from selectivit.vis.core_attention import core_attention_figure
from selectivit.vis.core_listeners import core_listeners_figure, listener_shares
from selectivit.vis.core_paths import core_colours, core_moves, core_paths_figure
from selectivit.vis.core_statistics import core_statistics


def gaussian(grid, centre, sigma):
    rows, columns = torch.meshgrid(*(torch.arange(n).double() for n in grid), indexing="ij")
    away = (rows - centre[0]) ** 2 + (columns - centre[1]) ** 2
    weights = (-away / (2 * sigma**2)).exp().flatten()
    return weights / weights.sum()


def test_effective_patches_count_patches_weighted_equally():
    maps = torch.zeros(1, 2, 12)
    maps[0, 0, :3], maps[0, 1, 5] = 0.2, 1.0  # the rest of core 0's attention goes to cores
    found = core_statistics(maps, torch.randn(12, 4), (3, 4))
    torch.testing.assert_close(found.effective_patches, torch.tensor([[3.0, 1.0]]).double())
    assert not found.likeness[0, 0].isnan() and found.likeness[0, 1].isnan()  # one patch has no other beside it


def test_a_round_blob_lies_under_itself_and_two_spots_do_not():
    grid = (20, 30)
    blob = gaussian(grid, (9, 14), 2.5)
    spots = gaussian(grid, (4, 4), 1.5) + gaussian(grid, (15, 25), 1.5)
    found = core_statistics(torch.stack([blob, spots])[None], torch.randn(600, 4), grid)
    assert found.blob_overlap[0, 0] > 0.97 and found.blob_overlap[0, 1] < 0.5


def test_likeness_is_that_of_two_different_patches_drawn_by_the_weights():
    torch.manual_seed(0)
    weights, features = torch.rand(6), torch.randn(6, 5)
    found = core_statistics(weights[None, None], features, (2, 3))
    centred = features - features.mean(0)
    p, cosines = weights / weights.sum(), torch.cosine_similarity(centred[:, None], centred[None], dim=-1)
    pairs = p[:, None] * p[None] * (1 - torch.eye(6))
    assert found.likeness.item() == pytest.approx(((pairs * cosines).sum() / pairs.sum()).item(), abs=1e-6)


def test_a_core_on_one_thing_is_above_its_blob_and_one_on_a_place_is_not():
    torch.manual_seed(0)
    grid = (12, 12)
    thing = torch.zeros(grid)
    thing[2:10, 2:4] = thing[8:10, 2:10] = 1  # an L: its blob lies half beside it
    features = torch.where(thing.flatten()[:, None] > 0, 3.0, -1.0) * torch.ones(144, 8) + torch.randn(144, 8)
    maps = torch.stack([thing.flatten(), gaussian(grid, (5, 5), 2).float()])[None]
    found = core_statistics(maps, features, grid)
    above = (found.likeness - found.blob_likeness)[0]
    assert above[0] > 0.3 and abs(above[1]) < 0.02


def test_numbers_of_places_and_listeners():
    coords = torch.zeros(3, 2, 2)
    coords[2, 1] = torch.tensor([0.6, -0.8])
    assert core_moves(coords).tolist() == [[0, 0], [0, 0], [0, 0.5]]
    winners = torch.tensor([[[0, 0, 1], [1, 3, 1]]])
    assert listener_shares(winners, 4).tolist() == [[2 / 6, 3 / 6, 0, 1 / 6]]


def test_the_listening_picture_has_each_patch_in_its_cores_colour():
    """A white photo under four patches, one a core: the panel holds the cores' own colours in their places."""
    winners, coords = torch.tensor([[[0, 1], [2, 3]]]), torch.zeros(1, 4, 2)
    figure = core_listeners_figure(torch.ones(40, 80, 3), {4: winners}, {4: coords}, [0])
    shown = np.asarray(figure.axes[1].images[0].get_array())
    for core, place in enumerate(((5, 10), (5, 70), (35, 10), (35, 70))):
        np.testing.assert_allclose(shown[place], core_colours(4)[core], atol=1e-6)


def test_paths_end_where_the_coordinates_say():
    coords = torch.tensor([[[-1.0, -1.0]], [[0.0, 0.5]]])
    figure = core_paths_figure(torch.rand(40, 80, 3), coords)
    ways = [line for line in figure.axes[0].lines if len(line.get_xdata()) == 2]
    for way in ways:
        assert list(way.get_xdata()) == [0, 40] and list(way.get_ydata()) == [0, 30]
    assert ways and to_rgb(ways[-1].get_color()) == core_colours(1)[0]


def test_budget_maps_share_their_colours():
    maps = {(size, cores): torch.randn(8, 4, 6) for size in (32, 64) for cores in (1, 4)}
    maps[64, 4] = maps[32, 1]
    figure = budget_maps_figure(torch.rand(40, 60, 3), maps, title="cost $5_a.jpg")
    panels = {(i, axes.get_title()): axes for i, axes in enumerate(figure.axes) if axes.images}
    pictures = [np.asarray(axes.images[0].get_array()) for axes in panels.values()]
    same = [(a, b) for a in range(5) for b in range(a) if np.array_equal(pictures[a], pictures[b])]
    assert len(same) == 1  # the two equal maps, and no others
    with pytest.raises(ValueError, match="every budget at every size"):
        budget_maps_figure(torch.rand(4, 4, 3), {(32, 1): maps[32, 1], (64, 4): maps[64, 4]})


@pytest.mark.parametrize("shape", [(30, 300), (300, 30), (1, 1)])
def test_photos_of_any_shape_are_drawn(shape):
    height, width = shape
    grid = (max(1, height // 15), max(1, width // 15))
    count, photo = grid[0] * grid[1], torch.rand(height, width, 3)
    maps, coords = torch.rand(2, 5, count), torch.rand(2, 5, 2) * 2 - 1
    found = core_statistics(maps, torch.randn(count, 4), grid)
    figures = [
        core_attention_figure(photo, maps.unflatten(2, grid), coords, [0, 4], [0, 1], found),
        core_paths_figure(photo, coords),
        core_listeners_figure(photo, {5: maps.argmax(1).unflatten(1, grid)}, {5: coords}, [0, 1]),
        budget_maps_figure(photo, {(32, 1): torch.randn(4, *grid)}),
    ]
    assert all(to_png(figure)[1:4] == b"PNG" and figure.get_figheight() < 30 for figure in figures)


def test_what_does_not_fit_is_refused():
    found = core_statistics(torch.ones(1, 1, 4), torch.randn(4, 2), (2, 2))
    with pytest.raises(ValueError, match="of N = 2 x 2 patches"):
        core_statistics(torch.ones(1, 1, 5), torch.randn(4, 2), (2, 2))
    with pytest.raises(ValueError, match="expected cores of 0 to 0, got"):
        core_attention_figure(torch.rand(4, 4, 3), torch.ones(1, 1, 2, 2), torch.zeros(1, 1, 2), [1], [0], found)
    with pytest.raises(ValueError, match="layers of 0 to 0"):
        core_listeners_figure(torch.rand(4, 4, 3), {1: torch.zeros(1, 2, 2)}, {1: torch.zeros(1, 1, 2)}, [1])
    with pytest.raises(ValueError, match="coordinates"):
        core_paths_figure(torch.rand(4, 4, 3), torch.zeros(2, 2))
    assert math.isclose(found.effective_patches.item(), 4)
