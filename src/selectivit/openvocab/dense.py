"""Patch features of a frozen CLIP in the space of its texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from selectivit.openvocab.attention import attention_of, clustering_attention
from selectivit.openvocab.presets import Preset, find_preset
from selectivit.swap.last_blocks import Entry, enter, halves
from selectivit.swap.sites import Tower, find_tower, host_of, unwrap


@dataclass(frozen=True)
class DenseTokens:
    """All tokens of an image in the space that images and texts share.

    Args:
        tokens: (B, num_prefix + h * w, E).
        num_prefix: how many tokens come before the patches.
        grid: (h, w) in patches.
    """

    tokens: Tensor
    num_prefix: int
    grid: tuple[int, int]

    @property
    def map(self) -> Tensor:
        """The patches in their places, (B, E, h, w)."""
        return self.tokens[:, self.num_prefix :].transpose(1, 2).unflatten(2, self.grid)


def image_tower(model: nn.Module) -> Tower:
    """The image tower of a model that embeds images and texts in one space.

    Args:
        model: a CLIP or SigLIP of open_clip or transformers.

    Returns:
        The tower.

    Raises:
        ValueError: no tower of patches, or no text tower; the text says which.
    """
    whole: Any = unwrap(model)
    tower, kind = find_tower(whole), type(whole).__name__
    if tower is None:
        raise ValueError(
            f"no image tower of patches found in {kind}: expected a CLIP or SigLIP with a Vision Transformer; the maps "
            "of convolutional towers are not in the space of texts"
        )
    host = host_of(whole)
    if not (hasattr(host, "has_text") and host.has_text(whole)):
        raise ValueError(
            f"{kind} has no text tower that shares a space with its images: expected a whole CLIP or SigLIP of "
            "open_clip or transformers"
        )
    return tower


def dense_tokens(model: nn.Module, images: Tensor, preset: str | Preset = "entmax-qq") -> DenseTokens:
    """All tokens after the last blocks attended a preset's way, the final norm and the projection to texts.

    The model is neither trained nor changed. Gradients flow unless the caller turns them off.

    Args:
        model: a CLIP or SigLIP of open_clip or transformers, with both towers.
        images: (B, 3, H, W), floating, normalised as the model expects, H and W multiples of the patch; any size and
            aspect, positions are interpolated as the host does.
        preset: a name of `PRESETS`, or one of your own.

    Returns:
        The tokens. A model that pools by attention (SigLIP) has its pool applied to each token alone, as MaskCLIP does
        with the attention pool of CLIP's ResNets.

    Raises:
        ValueError: a model whose patches and texts share no space, images of another shape, too few blocks.

    Example:
        >>> dense_tokens(clip, images, "naclip").map.shape  # doctest: +SKIP
        torch.Size([1, 512, 28, 28])
    """
    found, whole = find_preset(preset), unwrap(model)
    tower = image_tower(whole)
    patch = tower.host.preprocessing(tower.module).patch_size
    if images.ndim != 4 or images.shape[1] != 3 or any(side < patch or side % patch for side in images.shape[-2:]):
        raise ValueError(
            f"expected images (B, 3, H, W) with H and W multiples of {patch} (the patch), got {tuple(images.shape)}"
        )
    images = images.to(next(tower.module.parameters()).dtype)
    return last_blocks(whole, enter(tower, images, found.layers), found)


def last_blocks(model: nn.Module, entry: Entry, preset: Preset) -> DenseTokens:
    """`dense_tokens` from where the last blocks begin, so that several presets may share what comes before.

    Args:
        model: as for `dense_tokens`.
        entry: from `selectivit.swap.last_blocks.enter`, with as many blocks left as the preset has.
        preset: how they attend.

    Returns:
        The tokens.
    """
    whole, tower = unwrap(model), image_tower(model)
    tokens = (_two_streams if preset.two_streams else _one_stream)(tower, entry, preset)
    return DenseTokens(host_of(whole).align(whole, tower.module, tokens), entry.num_prefix, entry.grid)


def _one_stream(tower: Tower, entry: Entry, preset: Preset) -> Tensor:
    """The last blocks in turn; residual and FFN are dropped in the very last alone: earlier ones feed others."""
    x = entry.tokens
    for place in range(entry.block, entry.block + preset.layers):
        is_last = place == entry.block + preset.layers - 1
        block = halves(tower, entry, place, attention_of(preset, entry.grid, entry.num_prefix, place))
        added = block.attention(block.norm(x))
        x = added if is_last and not preset.residual else x + added
        if preset.ffn or not is_last:
            x = x + block.ffn(x)
    return x


def _two_streams(tower: Tower, entry: Entry, preset: Preset) -> Tensor:
    """GEM: the plain stream goes on as usual; the second gathers what the new attention makes of the plain one."""
    plain = gathered = entry.tokens
    for place in range(entry.block, entry.block + preset.layers):
        host = halves(tower, entry, place)
        normed = host.norm(plain)
        length = normed.float().norm(dim=-1).mean(-1).reshape(-1, 1, 1, 1)  # (B, 1, 1, 1)
        attention = clustering_attention(preset, length, entry.num_prefix, place)
        gathered = gathered + halves(tower, entry, place, attention).attention(normed)
        plain = plain + host.attention(normed)
        plain = plain + host.ffn(plain)
    return gathered
