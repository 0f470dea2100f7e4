"""Several threads, one model: each sees what it would see alone, and a bare forward is never disturbed."""

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from swap_hosts import HOSTS, images, randomise, timm_vit
from torch import Tensor

import selectivit as sv
from selectivit.swap.attend import STATE
from selectivit.swap.record import recording
from selectivit.swap.sites import find_sites
from selectivit.swap.tap import eager

CALLS = 50


@pytest.fixture(autouse=True)
def frequent_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def together(*works: Callable[[], Any], calls: int = CALLS) -> list[list[Any]]:
    """What each of the functions gives, called so often in a thread of its own, all at once."""
    found: list[list[Any]] = [[] for _ in works]
    start = threading.Barrier(len(works))

    def repeat(work: Callable[[], Any], results: list[Any]) -> None:
        start.wait()
        for _ in range(calls):
            try:
                with torch.no_grad():
                    results.append(work())
            except BaseException as error:
                results.append(error)

    threads = [threading.Thread(target=repeat, args=pair) for pair in zip(works, found, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def agree(found: list[Any], expected: Any) -> None:
    assert [error for error in found if isinstance(error, BaseException)] == []
    for one in found:
        torch.testing.assert_close(one, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["timm ViT", "open_clip CLIP", "transformers CLIP", "torchvision ViT"])
def test_features_and_maps_beside_a_bare_forward(name: str) -> None:
    host = HOSTS[name]
    model, x, y = randomise(host.build()), images(1, seed=1), images(1, seed=2)
    works = [
        lambda: sv.features(model, x, layer=0).patch_tokens,
        lambda: sv.features(model, y, layer=-1).patch_tokens,
        lambda: sv.attention_maps(model, x),
        lambda: sv.attention_maps(model, y, layer=0),
        lambda: host.forward(model, x),
    ]
    before = [(type(module), dict(vars(module))) for module in model.modules()]
    with torch.no_grad():
        expected = [work() for work in works]
    for found, wanted in zip(together(*works), expected, strict=True):
        agree(found, wanted)
    assert [(type(module), dict(vars(module))) for module in model.modules()] == before
    assert not any(STATE in vars(module) for module in model.modules())


def test_a_recording_notes_the_calls_of_its_thread_alone() -> None:
    model, x, y = randomise(timm_vit()), images(1, seed=1), images(1, seed=2)
    sites, _ = find_sites(model)

    def record(pictures: Tensor) -> Tensor:
        with recording(sites) as calls:
            model(pictures)
        assert [len(found) for found in calls.values()] == [1, 1, 1]
        return torch.stack([found[0].q for found in calls.values()])

    with torch.no_grad():
        expected = [record(x), record(y), model(x)]
    found = together(lambda: record(x), lambda: record(y), lambda: model(x))
    for some, wanted in zip(found, expected, strict=True):
        agree(some, wanted)


def test_a_swap_in_force_serves_all_threads() -> None:
    model, x = randomise(timm_vit()), images(1)
    with sv.swap_attention(model, layers=None):
        works = [lambda: sv.features(model, x, layer=1).map, lambda: sv.attention_maps(model, x), lambda: model(x)]
        with torch.no_grad():
            expected = [work() for work in works]
        for found, wanted in zip(together(*works, calls=20), expected, strict=True):
            agree(found, wanted)


def test_the_stance_of_the_compiler_is_given_back_by_the_last() -> None:
    import torch._dynamo.eval_frame as frame

    before = frame._stance
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with eager():
            inside.set()
            leave.wait()

    other = threading.Thread(target=hold)
    with eager():
        other.start()
        inside.wait()
    assert frame._stance.stance == "force_eager"  # the other thread still looks inside
    leave.set()
    other.join()
    assert frame._stance == before


def test_a_swap_left_over_a_recording_is_told() -> None:
    model = randomise(timm_vit())
    sites, _ = find_sites(model)
    with pytest.raises(RuntimeError, match="still in force"), recording(sites):
        swap = sv.swap_attention(model)
    swap.restore()
    with recording(sites):
        pass
    assert not any(STATE in vars(module) for module in model.modules())
