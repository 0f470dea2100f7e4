"""Small random CLIPs of every kind, and tokenizers for them."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

SIZE, PATCH, WIDTH, HEADS, DEPTH, EMBED = 32, 8, 32, 2, 3, 16
VISION = {"image_size": SIZE, "patch_size": PATCH, "width": WIDTH, "layers": DEPTH, "head_width": WIDTH // HEADS}
TEXT = {"context_length": 16, "vocab_size": 600, "width": WIDTH, "heads": HEADS, "layers": 2}


class WordTokenizer:
    """Words to numbers by a hash, called as open_clip's tokenizers are; the end's number is the largest."""

    def __init__(self, context_length: int = 16, vocab_size: int = 600) -> None:
        self.context_length, self.vocab_size, self.calls = context_length, vocab_size, 0

    def __call__(self, texts: Sequence[str]) -> Tensor:
        self.calls += 1
        out = torch.zeros(len(texts), self.context_length, dtype=torch.long)
        for row, text in zip(out, texts, strict=True):
            words = [1 + zlib.crc32(word.encode()) % (self.vocab_size - 3) for word in text.split()]
            words = [*words[: self.context_length - 1], self.vocab_size - 1]
            row[: len(words)] = torch.tensor(words)
        return out


def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Weights under which attention is peaked and every half of a block shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if any(word in name for word in ("gamma", "ls1", "ls2", "ls_1", "ls_2")):
                parameter.fill_(1.0)
            elif "logit" in name:
                continue
            elif parameter.ndim >= 2 and min(parameter.shape[0], parameter.shape[-1]) > 1:
                parameter.copy_(noise * (1.5 / parameter[0].numel() ** 0.5))
            elif "norm" in name or "ln_" in name:
                parameter.copy_((1.0 if name.endswith("weight") else 0.0) + 0.1 * noise)
            else:
                parameter.copy_(0.3 * noise)
    return model.eval()


def open_clip_vit(**options: Any) -> nn.Module:
    from open_clip.model import CLIP

    return randomise(CLIP(EMBED, VISION | options, TEXT, quick_gelu=True))


def open_clip_trunk(trunk: nn.Module, embed: int = EMBED) -> nn.Module:
    """open_clip around a timm tower that projects to the texts itself, as those of EVA-CLIP and SigLIP do."""
    from open_clip.model import CustomTextCLIP

    vision = {"timm_model_name": "vit_tiny_patch16_224", "timm_pool": "token", "timm_proj": "", "image_size": SIZE}
    model = CustomTextCLIP(embed, vision, TEXT)
    model.visual.trunk = trunk
    model.visual.head = nn.Sequential()
    return randomise(model)


TIMM = {"img_size": SIZE, "patch_size": PATCH, "embed_dim": WIDTH, "depth": DEPTH, "num_heads": HEADS}


def eva_clip() -> nn.Module:
    from timm.models.eva import Eva

    options = {"use_rot_pos_emb": True, "qkv_fused": False, "swiglu_mlp": True, "scale_mlp": True}
    return open_clip_trunk(Eva(**TIMM, **options, scale_attn_inner=True, global_pool="token", num_classes=EMBED))


def eva_clip_post_norm() -> nn.Module:
    from timm.models.eva import Eva

    return open_clip_trunk(Eva(**TIMM, use_post_norm=True, global_pool="token", num_classes=EMBED))


def timm_siglip() -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    return open_clip_trunk(VisionTransformer(**TIMM, class_token=False, global_pool="map", num_classes=0), WIDTH)


def timm_average() -> nn.Module:
    """A tower that averages its patches, norms and projects, in that order."""
    from timm.models.vision_transformer import VisionTransformer

    return open_clip_trunk(VisionTransformer(**TIMM, global_pool="avg", class_token=False, num_classes=EMBED))


def transformers_model(family: str, **options: Any) -> nn.Module:
    import transformers

    sizes = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "intermediate_size": 2 * WIDTH}
    vision = sizes | {"num_hidden_layers": DEPTH, "patch_size": PATCH, "image_size": SIZE} | options
    if family == "Siglip2":
        vision["num_patches"] = (SIZE // PATCH) ** 2
    text = sizes | {"num_hidden_layers": 2, "vocab_size": 600, "max_position_embeddings": 16}
    text |= {"eos_token_id": 3, "bos_token_id": 2, "pad_token_id": 1, "projection_size": WIDTH}
    config = getattr(transformers, f"{family}Config")(text_config=text, vision_config=vision)
    if family == "CLIP":
        config.projection_dim = EMBED
    return randomise(getattr(transformers, f"{family}Model")._from_config(config, attn_implementation="sdpa"))


def transformers_tokenizer(words: Sequence[str]) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {name: i for i, name in enumerate(["[UNK]", "[PAD]", "[BOS]", "[EOS]", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[BOS] $A [EOS]", special_tokens=[("[BOS]", 2), ("[EOS]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]", bos_token="[BOS]", eos_token="[EOS]"
    )


CLIPS = {
    "open_clip CLIP": open_clip_vit,
    "open_clip custom blocks": lambda: open_clip_vit(
        qk_norm=True, scale_heads=True, scale_attn_inner=True, scale_attn=True, ls_init_value=1e-5
    ),
    "EVA-CLIP": eva_clip,
    "EVA-CLIP, post-norm": eva_clip_post_norm,
    "timm SigLIP": timm_siglip,
    "timm average": timm_average,
    "transformers CLIP": lambda: transformers_model("CLIP"),
    "transformers SigLIP": lambda: transformers_model("Siglip"),
    "transformers SigLIP 2": lambda: transformers_model("Siglip2"),
}
POOLS_BY_CLASS_TOKEN = (
    "open_clip CLIP",
    "open_clip custom blocks",
    "EVA-CLIP",
    "EVA-CLIP, post-norm",
    "transformers CLIP",
)


def images(batch: int = 2, height: int = SIZE, width: int = SIZE, seed: int = 1) -> Tensor:
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(seed))


def encode_image(model: Any, x: Tensor) -> Tensor:
    """The image embedding by the host's own code, at the size the model was made for."""
    if hasattr(model, "encode_image"):
        return model.encode_image(x)
    if type(model).__name__ == "Siglip2Model":
        from transformers.models.siglip2.image_processing_siglip2 import convert_image_to_patches

        patches = torch.stack([convert_image_to_patches(image, PATCH) for image in x])
        grid = torch.tensor([[x.shape[-2] // PATCH, x.shape[-1] // PATCH]] * len(x))
        mask = torch.ones(patches.shape[:2], dtype=torch.int32)
        given = {"pixel_values": patches, "pixel_attention_mask": mask, "spatial_shapes": grid}
        return model.get_image_features(**given).pooler_output
    resized = {} if x.shape[-1] == SIZE and x.shape[-2] == SIZE else {"interpolate_pos_encoding": True}
    return model.get_image_features(pixel_values=x, **resized).pooler_output


def save_open_clip(folder: Any, model: nn.Module, vision: dict[str, Any] | None = None) -> None:
    """A folder as open_clip writes it for the hub."""
    from safetensors.torch import save_file

    config = {"model_cfg": {"embed_dim": EMBED, "vision_cfg": vision or VISION, "text_cfg": TEXT, "quick_gelu": True}}
    config["preprocess_cfg"] = {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    state = {name: tensor.contiguous().clone() for name, tensor in model.state_dict().items()}
    save_file(state, folder / "open_clip_model.safetensors")
