"""Names of pretrained models: their forms, and the ones worth knowing."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

FORMS = """Accepted names:
  dinov2-small                              the real DINOv2 ViT-S/14, from the model hub or else through pip
  veca-tiny                                 our small core-periphery model, part of the package
  scenes                                    our small CLIP of rendered scenes, part of the package
  vit_base_patch16_224.augreg_in21k         a timm name (also timm:NAME)
  facebook/dinov2-small                     a transformers id (also transformers:ID)
  open_clip:ViT-B-16/openai                 an open_clip model and its tag
  ./folder                                  a folder that timm, transformers, open_clip or save_pretrained wrote"""

EMBEDDED = {"veca-tiny": Path(__file__).parent / "veca_tiny", "scenes": Path(__file__).parent / "scenes_clip"}
"""Models whose weights come with the package: name -> folder."""
PREFIXES = ("timm", "transformers", "open_clip")


@dataclass(frozen=True)
class ModelEntry:
    """A pretrained model by name.

    Args:
        name: what `load_model` takes.
        source: the library that builds it.
        params: number of parameters of the whole model, text tower and head included.
        note: what it is, in a few words.
    """

    name: str
    source: str
    params: int
    note: str


ENTRIES = (
    ModelEntry("dinov2-small", "timm", 22_056_192, "DINOv2 ViT-S/14; needs no model hub"),
    ModelEntry("veca-tiny", "selectivit", 5_545_697, "VECA of 12 blocks, 192 wide, from DINOv2-small; for research"),
    ModelEntry("scenes", "open_clip", 4_324_417, "CLIP ViT of 6 layers, 192 wide, patch 8, on rendered scenes; a toy"),
    ModelEntry("vit_base_patch14_dinov2.lvd142m", "timm", 86_579_712, "DINOv2 ViT-B/14"),
    ModelEntry("vit_small_patch14_reg4_dinov2.lvd142m", "timm", 22_057_344, "DINOv2 ViT-S/14 with 4 registers"),
    ModelEntry("vit_small_patch16_dinov3.lvd1689m", "timm", 21_586_944, "DINOv3 ViT-S/16"),
    ModelEntry("vit_small_patch16_224.dino", "timm", 21_665_664, "DINO ViT-S/16"),
    ModelEntry("vit_base_patch16_224.augreg_in21k", "timm", 102_595_923, "supervised ViT-B/16, ImageNet-21k"),
    ModelEntry("deit_small_patch16_224.fb_in1k", "timm", 22_050_664, "DeiT-S/16, ImageNet-1k"),
    ModelEntry("vit_base_patch16_siglip_224.webli", "timm", 92_884_224, "SigLIP ViT-B/16, image tower"),
    ModelEntry("open_clip:ViT-B-16/openai", "open_clip", 149_620_737, "CLIP ViT-B/16"),
    ModelEntry("open_clip:ViT-B-16/laion2b_s34b_b88k", "open_clip", 149_620_737, "CLIP ViT-B/16 on LAION-2B"),
    ModelEntry("facebook/dinov2-small", "transformers", 22_056_576, "DINOv2 ViT-S/14"),
    ModelEntry("openai/clip-vit-base-patch16", "transformers", 149_620_737, "CLIP ViT-B/16"),
    ModelEntry("google/siglip-base-patch16-224", "transformers", 203_155_970, "SigLIP ViT-B/16"),
)


def parse_name(name: str) -> tuple[str, str]:
    """Tell the form of a model's name.

    Args:
        name: see `FORMS`. A folder that exists wins over a transformers id of the same spelling.

    Returns:
        (source, rest): source is "dinov2-small", "folder", "timm", "transformers" or "open_clip".

    Raises:
        ValueError: empty, or a path where there is no folder.

    Example:
        >>> parse_name("open_clip:ViT-B-16/openai")
        ('open_clip', 'ViT-B-16/openai')
        >>> parse_name("facebook/dinov2-small")
        ('transformers', 'facebook/dinov2-small')
    """
    name = name.strip()
    if not name:
        raise ValueError(f"expected the name of a model, got an empty one. {FORMS}")
    prefix, colon, rest = name.partition(":")
    if colon and prefix in PREFIXES:
        if not rest:
            raise ValueError(f"expected a name after {prefix!r}:, got {name!r}. {FORMS}")
        return prefix, rest
    if name == "dinov2-small":
        return name, name
    if name in EMBEDDED:
        return "folder", str(EMBEDDED[name])
    path = Path(name).expanduser()
    if path.is_dir():
        return "folder", str(path)
    if path.is_file():
        raise ValueError(f"{name} is a file; expected the folder that holds it and its configuration. {FORMS}")
    if re.match(r"[~./\\]|\w:[\\/]", name) or name.endswith(("/", "\\")) or re.split(r"[/\\]", name)[2:]:
        raise ValueError(f"there is no folder {name!r} (in {os.getcwd()}). {FORMS}")
    if colon:
        raise unknown_name(name, [f"{known}:{rest}" for known in PREFIXES])
    if name.startswith("timm/"):
        return "timm", f"hf-hub:{name}"
    return ("transformers" if "/" in name else "timm"), name


def unknown_name(name: str, known: Iterable[str]) -> ValueError:
    """The error for a name that no source knows.

    Args:
        name: what was asked for.
        known: names that exist; the closest are offered.

    Returns:
        The error, to be raised.

    Example:
        >>> str(unknown_name("resnet51", ["resnet50"])).splitlines()[0]
        "unknown model 'resnet51'; did you mean 'resnet50'?"
    """
    everything = dict.fromkeys([*(entry.name for entry in ENTRIES), *known])
    close = difflib.get_close_matches(name, everything, n=3, cutoff=0.6)
    hint = f"; did you mean {' or '.join(repr(match) for match in close)}?" if close else "."
    return ValueError(f"unknown model {name!r}{hint}\n{FORMS}")
