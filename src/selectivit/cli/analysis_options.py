"""The options of the analyses."""

from __future__ import annotations

from dataclasses import dataclass

from selectivit.cli.options import option

SIX = "qk,qq,kk,vv,qq+kk,qq+kk+vv"
SOURCES = "score sources with commas between: qk, qq, kk, vv, sums such as qq+kk"


@dataclass(frozen=True)
class DataOptions:
    """The photos and their masks."""

    layout: str | None = option(None, "NAME", "how the folder is laid out, such as voc21; default: found out")
    split: str = option("val", "NAME", "which part of the data")
    photos: int = option(0, "N", "so many photos, evenly spread over the split; 0 is all")


@dataclass(frozen=True)
class ReadingOptions:
    """How CLIP is read beside what the analysis varies."""

    preset: str = option("entmax-qq", "NAME", "all other settings are this preset's; see `selectivit segment`")
    alpha: float = option(1.2, "ALPHA", "entmax's alpha")
    size: int | None = option(None, "PX", "the photos' shorter side; default: the preset's")
    templates: str | None = option(None, "NAME", "prompts: imagenet80, imagenet7, photo or none; default: the preset's")
    background: str = option(
        "both", "HOW", "what becomes background, where the data has it: words, below (a threshold) or both"
    )
    threshold: float | None = option(None, "P", "probability (0..1) below which a pixel is background")


@dataclass(frozen=True)
class DiffusenessOptions:
    """Whose attention is measured."""

    scores: str = option(SIX, "SOURCES", SOURCES)
    alpha: float = option(1.2, "ALPHA", "entmax's alpha")
    size: int = option(448, "PX", "the photos' shorter side")
    layers: str | int = option("all", "LAYERS", "all; -1 the last, -4 the last four; 0,5,11 just these")


@dataclass(frozen=True)
class GainOptions:
    """What is compared."""

    scores: str = option(SIX, "SOURCES", SOURCES)


@dataclass(frozen=True)
class ControlsOptions:
    """What entmax is compared with."""

    scores: str = option("qk,qq", "SOURCES", SOURCES)
    temperature: float = option(0.5, "T", "softmax's scores are divided by this: below 1 it is sharper, without zeros")


@dataclass(frozen=True)
class ResolutionOptions:
    """The sizes that are compared."""

    scores: str = option("qk,qq,vv", "SOURCES", SOURCES)
    sizes: str = option("224,336,448", "PX,…", "the photos' shorter sides")


@dataclass(frozen=True)
class BackbonesOptions:
    """What is compared; give the models as --model A,B."""

    scores: str = option("qk,qq,vv", "SOURCES", SOURCES)


@dataclass(frozen=True)
class GridOptions:
    """The grid."""

    scores: str = option("qk", "SOURCE", "one score source")
    depths: str = option("1,2,3,5", "N,…", "how many of the last layers attend by entmax")
    alphas: str = option("1,1.1,1.2,1.3,1.5,2", "ALPHA,…", "entmax's alphas; 1 is softmax, 2 sparsemax")
