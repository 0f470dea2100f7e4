"""Small random models of every host, with what is known about each independently of the package."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

SIZE, PATCH, WIDTH, HEADS, DEPTH = 32, 8, 32, 2, 3
GRID = (SIZE // PATCH, SIZE // PATCH)


@dataclass(frozen=True)
class Host:
    """One row of the table of hosts."""

    build: Callable[[], nn.Module]
    prefix: int = 1
    registers: int = 0
    has_cls: bool = True
    image: bool = True
    skipped: int = 0
    native: Callable[[nn.Module, Tensor], Tensor] | None = None  # normed tokens of the last block, by the host itself
    forward: Callable[[nn.Module, Tensor], Any] = field(default=lambda model, x: model(x))
    text: Callable[[nn.Module], Tensor] | None = None


def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Weights that make attention peaked, and layer scales of 1: near zero they would hide a swap."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if any(word in name for word in ("gamma", "lambda1")):
                parameter.fill_(1.0)
            elif name == "logit_scale":
                continue
            elif parameter.ndim >= 2 and min(parameter.shape[0], parameter.shape[-1]) > 1:
                parameter.copy_(noise * (2.0 / parameter[0].numel() ** 0.5))
            elif "norm" in name or "ln_" in name or ".ln." in name:
                parameter.copy_((1.0 if name.endswith("weight") else 0.0) + 0.1 * noise)
            else:
                parameter.copy_(0.3 * noise)
    return model.eval()


def images(batch: int = 2, height: int = SIZE, width: int = SIZE, seed: int = 1) -> Tensor:
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(seed))


# --- timm ---------------------------------------------------------------------------------------------------------


def timm_vit(**options: Any) -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    settings = {"img_size": SIZE, "patch_size": PATCH, "embed_dim": WIDTH, "depth": DEPTH, "num_heads": HEADS}
    return VisionTransformer(**(settings | {"num_classes": 5} | options))


def timm_deit() -> nn.Module:
    from timm.models.deit import VisionTransformerDistilled

    return VisionTransformerDistilled(
        img_size=SIZE, patch_size=PATCH, embed_dim=WIDTH, depth=DEPTH, num_heads=HEADS, num_classes=5
    )


def known_to(kind: type, **options: Any) -> dict[str, Any]:
    """Those of the options that this release of timm has: older ones lack some, and what they lack needs no test."""
    return {name: value for name, value in options.items() if name in inspect.signature(kind).parameters}


def timm_eva(**options: Any) -> nn.Module:
    from timm.models.eva import Eva

    settings = {"img_size": SIZE, "patch_size": PATCH, "embed_dim": WIDTH, "depth": DEPTH, "num_heads": HEADS}
    return Eva(**known_to(Eva, **(settings | {"num_classes": 5, "use_rot_pos_emb": True} | options)))


def timm_dinov3(**options: Any) -> nn.Module:
    settings = {"rope_type": "dinov3", "use_abs_pos_emb": False, "num_reg_tokens": 4, "rope_rotate_half": True}
    return timm_eva(**(settings | {"global_pool": "avg", "use_fc_norm": False, "init_values": 1e-5} | options))


def timm_eva02() -> nn.Module:
    return timm_eva(qkv_fused=False, swiglu_mlp=True, scale_mlp=True, scale_attn_inner=True, global_pool="token")


def timm_tokens(model: Any, x: Tensor) -> Tensor:
    return model.forward_features(x)


# --- open_clip ----------------------------------------------------------------------------------------------------

TEXT = {"context_length": 8, "vocab_size": 50, "width": WIDTH, "heads": HEADS, "layers": 2}
VISION = {"image_size": SIZE, "patch_size": PATCH, "width": WIDTH, "layers": DEPTH, "head_width": WIDTH // HEADS}


def open_clip_model(**options: Any) -> nn.Module:
    from open_clip.model import CLIP

    return CLIP(16, VISION | options, TEXT)


def open_clip_coca() -> nn.Module:
    from open_clip.coca_model import CoCa

    vision = VISION | {"attentional_pool": True, "attn_pooler_heads": HEADS, "attn_pooler_queries": 4}
    vision |= {"output_tokens": True}
    return CoCa(WIDTH, TEXT | {"embed_cls": True, "output_tokens": True}, TEXT, vision)


def open_clip_timm() -> nn.Module:
    from open_clip.model import CustomTextCLIP

    vision = {
        "timm_model_name": "vit_tiny_patch16_224",
        "timm_pool": "token",
        "timm_proj": "linear",
        "image_size": SIZE,
    }
    model = CustomTextCLIP(16, vision, TEXT)
    model.visual.trunk = timm_vit(num_classes=0)
    model.visual.head = nn.Linear(WIDTH, 16)
    return model


def open_clip_text(model: Any) -> Tensor:
    text = torch.arange(16).reshape(2, 8) % 49 + 1
    return model.encode_text(text)


def open_clip_tokens(model: Any, x: Tensor) -> Tensor:
    normalise = getattr(model.visual, "attn_pool", None) is None
    out = model.visual.forward_intermediates(
        x, indices=1, normalize_intermediates=normalise, output_fmt="NLC", output_extra_tokens=True
    )
    return torch.cat([out["image_intermediates_prefix"][0], out["image_intermediates"][0]], dim=1)


# --- transformers -------------------------------------------------------------------------------------------------

HF = {"hidden_size": WIDTH, "num_hidden_layers": DEPTH, "num_attention_heads": HEADS, "patch_size": PATCH}
HF_TEXT = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS, "vocab_size": 50}
HF_TEXT |= {"intermediate_size": 2 * WIDTH, "max_position_embeddings": 8, "eos_token_id": 49, "bos_token_id": 48}
HF_TEXT |= {"pad_token_id": 1}


def hf_both(family: str, attention: str = "sdpa") -> nn.Module:
    import transformers

    config_class, model_class = getattr(transformers, f"{family}Config"), getattr(transformers, f"{family}Model")
    vision = HF | {"intermediate_size": 2 * WIDTH, "image_size": SIZE}
    if family == "Siglip2":
        vision = HF | {"intermediate_size": 2 * WIDTH, "num_patches": GRID[0] * GRID[1]}
    config = config_class(text_config=HF_TEXT, vision_config=vision)
    if family == "CLIP":
        config.projection_dim = 16
    return model_class._from_config(config, attn_implementation=attention)


def hf_vision(family: str, attention: str = "sdpa", **options: Any) -> nn.Module:
    import transformers

    config_class, model_class = getattr(transformers, f"{family}Config"), getattr(transformers, f"{family}Model")
    sizes = {"image_size": SIZE} | ({"intermediate_size": 2 * WIDTH} if family in ("ViT", "DINOv3ViT") else {})
    return model_class._from_config(config_class(**(HF | sizes | options)), attn_implementation=attention)


def hf_timm() -> nn.Module:
    from transformers import TimmWrapperConfig, TimmWrapperModel

    sizes = {"img_size": SIZE, "patch_size": PATCH, "embed_dim": WIDTH, "depth": DEPTH, "num_heads": HEADS}
    return TimmWrapperModel(TimmWrapperConfig(architecture="vit_tiny_patch16_224", model_args=sizes, do_pooling=True))


def hf_forward(model: Any, x: Tensor) -> Tensor:
    if hasattr(model, "vision_model"):
        return model.get_image_features(pixel_values=x).pooler_output
    return model(pixel_values=x).pooler_output


def siglip2_inputs(x: Tensor) -> dict[str, Tensor]:
    from transformers.models.siglip2.image_processing_siglip2 import convert_image_to_patches

    patches = torch.stack([convert_image_to_patches(image, PATCH) for image in x])
    grid = torch.tensor([[x.shape[-2] // PATCH, x.shape[-1] // PATCH]] * len(x))
    mask = torch.ones(patches.shape[:2], dtype=torch.int32)
    return {"pixel_values": patches, "pixel_attention_mask": mask, "spatial_shapes": grid}


def siglip2_forward(model: Any, x: Tensor) -> Tensor:
    return model.get_image_features(**siglip2_inputs(x)).pooler_output


def hf_tokens(model: Any, x: Tensor) -> Tensor:
    tower = getattr(model, "vision_model", model)
    if type(tower).__name__ == "Siglip2VisionModel":
        return tower(**siglip2_inputs(x)).last_hidden_state
    out = tower(pixel_values=x).last_hidden_state
    return tower.post_layernorm(out) if type(tower).__name__ == "CLIPVisionModel" else out


def hf_text(model: Any) -> Tensor:
    text = torch.arange(16).reshape(2, 8) % 47 + 2
    text[:, -1] = 49
    return model.get_text_features(input_ids=text).pooler_output


# --- torch --------------------------------------------------------------------------------------------------------


def torchvision_vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(SIZE, PATCH, DEPTH, HEADS, WIDTH, 2 * WIDTH, num_classes=5)


def torchvision_tokens(model: Any, x: Tensor) -> Tensor:
    x = model._process_input(x)
    return model.encoder(torch.cat([model.class_token.expand(len(x), -1, -1), x], dim=1))


class TokenEncoder(nn.Module):
    """Plain torch: patches and an `nn.TransformerEncoder`."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, DEPTH)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        tokens = self.patch(x).flatten(2).transpose(1, 2)
        return self.encoder(tokens, src_key_padding_mask=padding)


HOSTS: dict[str, Host] = {
    "timm ViT": Host(timm_vit, native=timm_tokens),
    "timm DeiT (distilled)": Host(timm_deit, prefix=2, native=timm_tokens),
    "timm DINOv2 (registers)": Host(
        lambda: timm_vit(reg_tokens=4, no_embed_class=True, init_values=1e-5), prefix=5, registers=4, native=timm_tokens
    ),
    "timm DINOv3": Host(timm_dinov3, prefix=5, registers=4, native=timm_tokens),
    "timm EVA-02": Host(timm_eva02, native=timm_tokens),
    "timm ViT with RoPE": Host(
        lambda: timm_eva(attn_type="rope", rope_type="mixed", qk_norm=True, num_reg_tokens=1, no_embed_class=True),
        prefix=2,
        registers=1,
        native=lambda model, x: model.norm(model.forward_intermediates(x, intermediates_only=False)[0]),
    ),
    "timm SigLIP": Host(
        lambda: timm_vit(class_token=False, global_pool="map", qk_norm=True),
        prefix=0,
        has_cls=False,
        skipped=1,
        native=timm_tokens,
    ),
    "open_clip CLIP": Host(
        open_clip_model,
        skipped=2,
        native=open_clip_tokens,
        forward=lambda model, x: model.encode_image(x),
        text=open_clip_text,
    ),
    "open_clip custom blocks": Host(
        lambda: open_clip_model(qk_norm=True, scale_heads=True, scale_attn_inner=True, ls_init_value=1e-5),
        skipped=2,
        native=open_clip_tokens,
        forward=lambda model, x: model.encode_image(x),
        text=open_clip_text,
    ),
    "open_clip CoCa": Host(
        open_clip_coca,
        skipped=7,
        native=open_clip_tokens,
        forward=lambda model, x: model.encode_image(x),
        text=open_clip_text,
    ),
    "open_clip with a timm tower": Host(
        open_clip_timm,
        skipped=2,
        native=lambda model, x: model.visual.trunk.forward_features(x),
        forward=lambda model, x: model.encode_image(x),
        text=open_clip_text,
    ),
    "transformers CLIP": Host(lambda: hf_both("CLIP"), skipped=2, native=hf_tokens, forward=hf_forward, text=hf_text),
    "transformers SigLIP": Host(
        lambda: hf_both("Siglip"),
        prefix=0,
        has_cls=False,
        skipped=3,
        native=hf_tokens,
        forward=hf_forward,
        text=hf_text,
    ),
    "transformers SigLIP 2": Host(
        lambda: hf_both("Siglip2"),
        prefix=0,
        has_cls=False,
        skipped=3,
        native=hf_tokens,
        forward=siglip2_forward,
        text=hf_text,
    ),
    "transformers DINOv2": Host(lambda: hf_vision("Dinov2"), native=hf_tokens, forward=hf_forward),
    "transformers DINOv2 (registers)": Host(
        lambda: hf_vision("Dinov2WithRegisters", num_register_tokens=4),
        prefix=5,
        registers=4,
        native=hf_tokens,
        forward=hf_forward,
    ),
    "transformers DINOv3": Host(
        lambda: hf_vision("DINOv3ViT", num_register_tokens=4),
        prefix=5,
        registers=4,
        native=hf_tokens,
        forward=hf_forward,
    ),
    "transformers ViT": Host(lambda: hf_vision("ViT"), native=hf_tokens, forward=hf_forward),
    "transformers with a timm model": Host(
        hf_timm, native=lambda model, x: model.timm_model.forward_features(x), forward=hf_forward
    ),
    "torchvision ViT": Host(torchvision_vit, native=torchvision_tokens),
    "nn.TransformerEncoder": Host(TokenEncoder, prefix=0, has_cls=False, image=False),
}
