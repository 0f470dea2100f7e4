"""Small models in local folders, and photos, for the page."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

ROOT = Path(__file__).parents[2]


def save_vit(folder: Path) -> str:
    """A random ViT that timm wrote: 4 layers, 2 heads, patches of 14 px."""
    timm = pytest.importorskip("timm")
    from timm.models._hub import save_for_hf

    torch.manual_seed(0)
    arguments = {"img_size": 112, "patch_size": 14, "depth": 4, "embed_dim": 32, "num_heads": 2, "num_classes": 0}
    model = timm.create_model("vit_tiny_patch16_224", **arguments)
    for parameter in model.parameters():  # random attention is nearly uniform: sharpen it, so that a swap shows
        parameter.data.mul_(3)
    save_for_hf(model, str(folder), safe_serialization=True, model_args=arguments)
    return str(folder)


def save_clip(folder: Path) -> str:
    """A random CLIP that open_clip reads, with the small vocabulary of the rendered scenes."""
    pytest.importorskip("open_clip")
    from open_clip.model import CLIP
    from open_clip.tokenizer import SimpleTokenizer
    from safetensors.torch import save_file

    sys.path.insert(0, str(ROOT / "examples" / "scenes"))
    try:
        from vocabulary import write_merges
    finally:
        sys.path.pop(0)
    folder.mkdir(parents=True)
    words = SimpleTokenizer(str(write_merges(folder)), context_length=16).vocab_size
    vision = {"image_size": 112, "patch_size": 16, "width": 32, "layers": 3, "head_width": 16}
    text = {"context_length": 16, "vocab_size": words, "width": 32, "heads": 2, "layers": 2}
    torch.manual_seed(0)
    model = CLIP(16, vision, text, quick_gelu=True)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and "logit" not in name:
            torch.nn.init.normal_(parameter, std=0.3)
    config = {"model_cfg": {"embed_dim": 16, "vision_cfg": vision, "text_cfg": text, "quick_gelu": True}}
    config["preprocess_cfg"] = {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    state = {name: tensor.contiguous().clone() for name, tensor in model.state_dict().items()}
    save_file(state, folder / "open_clip_model.safetensors")
    return str(folder)


def write_photo(path: Path, colour: tuple[int, int, int], size: tuple[int, int] = (160, 112)) -> Path:
    """A photo with a dark square on one colour."""
    image = Image.new("RGB", size, colour)
    image.paste((20, 20, 20), (size[0] // 8, size[1] // 4, size[0] // 2, 3 * size[1] // 4))
    image.save(path)
    return path
