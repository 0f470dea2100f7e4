"""The published ways of reading dense features out of a frozen CLIP, as plain data."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Literal

from selectivit.ops.scores import PAIRS, score_pairs
from selectivit.ops.selective import AttentionRule

COMBINATIONS = ("mean", "sum", "scores")


@dataclass(frozen=True)
class Preset:
    """One way from a frozen CLIP to a segmentation: the last blocks' attention, and the settings around it.

    Change one by `dataclasses.replace(PRESETS["sclip"], normalizer="entmax", alpha=1.2)`.

    Args:
        scores: "qk", "qq", "kk", "vv", a sum such as "qq+kk", or "v" (no mixing).
        normalizer: "softmax", "entmax", "sparsemax" or "random_mask".
        alpha: entmax's α; the random mask keeps as many keys as this entmax. "auto": for each head and image α and the
            scale of the scores are chosen by how diffuse softmax is (`selectivit.openvocab.auto`).
        combine: of a sum of score sources: the "mean" or the "sum" of the attention maps, or one map of the mean
            "scores".
        temperature: divides the scores.
        seed: of the random mask.
        layers: how many of the last blocks attend this way.
        residual: the last block adds to the tokens that enter it; False keeps its output alone.
        ffn: the last block applies its feed-forward half.
        neighbourhood: σ in patches of a Gaussian around each patch that is added to the scores; None adds nothing.
        two_streams: GEM's second stream beside the untouched one; `residual` and `ffn` then say nothing.
        size: pixels of the picture's shorter side; None is the size the model was made for.
        window: side in pixels of a square window that slides over the picture; None takes the picture whole.
        stride: pixels between windows.
        logit_scale: factor on cosines before the softmax over classes; None is the model's own.
        threshold: probability below which a pixel is background, where background is asked for.
        templates: name of the prompt templates.
        source: where it was published, and what of it is not.

    Raises:
        ValueError: a name or number outside these.
    """

    scores: str = "qk"
    normalizer: str = "softmax"
    alpha: float | Literal["auto"] = 1.2
    combine: str = "mean"
    temperature: float = 1.0
    seed: int = 0
    layers: int = 1
    residual: bool = True
    ffn: bool = True
    neighbourhood: float | None = None
    two_streams: bool = False
    size: int | None = 448
    window: int | None = None
    stride: int | None = None
    logit_scale: float | None = None
    threshold: float | None = None
    templates: str = "imagenet80"
    source: str = ""

    def __post_init__(self) -> None:
        if self.combine not in COMBINATIONS:
            raise ValueError(f"combine must be one of {', '.join(COMBINATIONS)}, got {self.combine!r}")
        if isinstance(self.alpha, str) and (self.alpha != "auto" or self.normalizer != "entmax"):
            raise ValueError(
                f"alpha is a number, or 'auto' with the normalizer entmax, got {self.alpha!r} with {self.normalizer}"
            )
        self.rule(0)  # checks the names and numbers that it takes
        if self.two_streams and (self.neighbourhood is not None or any(a != b for a, b in score_pairs(self.scores))):
            raise ValueError(
                f"two streams compare projections with themselves ({', '.join(p for p in PAIRS if p != 'qk')}) without "
                f"a neighbourhood, got scores={self.scores!r}, neighbourhood={self.neighbourhood}"
            )
        if (self.window is None) != (self.stride is None):
            raise ValueError(f"window and stride go together, got window={self.window}, stride={self.stride}")
        numbers = ("layers", "size", "window", "stride", "logit_scale", "neighbourhood")
        for name in numbers:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"expected {name} above 0, got {value}")
        if self.stride is not None and self.window is not None and self.stride > self.window:
            raise ValueError(f"a stride of {self.stride} px would leave gaps between windows of {self.window} px")
        if self.threshold is not None and not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold is a probability, got {self.threshold}")

    def rule(self, layer: int) -> AttentionRule:
        """The rule of attention of the block at `layer`; "auto" has a number in its place."""
        combine = "mean" if self.combine == "scores" else self.combine
        return AttentionRule(
            self.normalizer,
            alpha=1.5 if isinstance(self.alpha, str) else self.alpha,
            scores=self.scores,
            temperature=self.temperature,
            combine=combine,
            seed=self.seed,
            layer=layer,
        )


SLIDING = {"size": 336, "window": 224, "stride": 112, "logit_scale": 40.0, "threshold": 0.1}
ENTMAX = {"normalizer": "entmax", "alpha": 1.2, "threshold": 0.75}
ENTMAX_SOURCE = "arXiv 2607.07135; templates, logit scale and how sums combine are not stated"

PRESETS: dict[str, Preset] = {
    "clip": Preset(**SLIDING, source="CLIP as it is (arXiv 2103.00020), in SCLIP's harness"),
    "maskclip": Preset(scores="v", **SLIDING, source="arXiv 2112.01071 (its own code), in SCLIP's harness"),
    "sclip": Preset(scores="qq+kk", combine="sum", **SLIDING, source="arXiv 2312.01597"),
    "clearclip": Preset(
        scores="qq",
        residual=False,
        ffn=False,
        size=448,
        window=448,
        stride=224,
        logit_scale=50.0,
        threshold=0.5,
        source="arXiv 2407.12442",
    ),
    "naclip": Preset(
        scores="kk", residual=False, ffn=False, neighbourhood=5.0, **SLIDING, source="arXiv 2404.08181, without PAMR"
    ),
    "gem": Preset(
        scores="qq+kk+vv", layers=6, two_streams=True, templates="photo", source="arXiv 2312.00878; size is ours"
    ),
    **{
        f"entmax-{scores}": Preset(scores=scores, **ENTMAX, source=ENTMAX_SOURCE)
        for scores in ("qk", "qq", "kk", "vv", "qq+kk", "qq+kk+vv")
    },
    "selectivit": Preset(
        scores="qq+kk+vv",
        residual=False,
        ffn=False,
        **ENTMAX,
        source="ours: not published; measured on rendered scenes alone",
    ),
}


def find_preset(preset: str | Preset) -> Preset:
    """A preset by its name, or as it is.

    Args:
        preset: a key of `PRESETS`, or one of your own.

    Returns:
        The preset.

    Raises:
        ValueError: no such name.

    Example:
        >>> find_preset("naclip").neighbourhood
        5.0
    """
    if isinstance(preset, Preset):
        return preset
    if preset not in PRESETS:
        close = difflib.get_close_matches(str(preset), PRESETS, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"unknown preset {preset!r}; {hint}there are: {', '.join(PRESETS)}")
    return PRESETS[preset]
