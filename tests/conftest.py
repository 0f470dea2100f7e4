"""Shared by all tests: one thread (tensors are small), bounded hypothesis runs, and uninitialised memory that shows."""

from __future__ import annotations

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("default", max_examples=25, deadline=None, derandomize=True)
hypothesis.settings.load_profile("default")
torch.set_num_threads(1)


@pytest.fixture
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what torch.empty returns with NaN, so that a row that is never written shows."""

    def poisoned(make):
        def filled(*args, **kwargs):
            tensor = make(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return filled

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
