"""VECA: a Vision Transformer whose patches talk only through a few learnt cores, as many as the caller can afford."""

from __future__ import annotations

import numbers
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from selectivit.layers.block import CoreBlock
from selectivit.layers.core_bank import CoreBank
from selectivit.models.checkpoint import fill, read_model, write_model
from selectivit.models.veca_config import VecaConfig
from selectivit.models.veca_official import read_official
from selectivit.ops.rope import axial_rotations, moved_coordinates, patch_coordinates, patch_rotations


@dataclass(frozen=True)
class VecaOutput:
    """What a forward gives.

    Args:
        cls: (B, D), the image's token: core 0 after the final norm.
        cores: (B, C, D), all active cores after the final norm, core 0 among them.
        patch_tokens: (B, h * w, D), row by row, after the final norm.
        grid: (h, w) in patches.
        core_coords: (depth, B, C, 2), x and y in (−1, 1) of every core as each block used them.
        projected_cls: (B, out_dim), or None for a model without output projection.
        projected_patches: (B, h * w, out_dim), or None.
        core_maps: of each block asked for, (B, H, C, h * w): how much a core takes from each patch.
        patch_maps: of the same blocks, (B, H, h * w, C): how much a patch takes from each core; rows sum to 1.
    """

    cls: Tensor
    cores: Tensor
    patch_tokens: Tensor
    grid: tuple[int, int]
    core_coords: Tensor
    projected_cls: Tensor | None = None
    projected_patches: Tensor | None = None
    core_maps: tuple[Tensor, ...] = ()
    patch_maps: tuple[Tensor, ...] = ()


torch.export.register_dataclass(VecaOutput)  # so that a model can be exported as it is


@dataclass(frozen=True)
class _Trunk:
    tokens: Tensor  # (B, C + N, D)
    grid: tuple[int, int]
    coords: list[Tensor]
    maps: dict[int, tuple[Tensor, Tensor]]


class Veca(nn.Module):
    """A core-periphery Vision Transformer: linear cost in the patches, a budget of cores chosen at run time.

    Args:
        config: see `VecaConfig`; `create_model("veca_small_patch16")` makes one of the published sizes.

    Example:
        >>> model = Veca(VecaConfig(dim=32, depth=2, num_heads=2, hidden_dim=48, num_cores=8)).eval()
        >>> out = model(torch.randn(1, 3, 32, 48), num_cores=4)
        >>> out.cls.shape, out.patch_tokens.shape, out.grid
        (torch.Size([1, 32]), torch.Size([1, 6, 32]), (2, 3))

    Source: arXiv 2605.12491.
    """

    def __init__(self, config: VecaConfig) -> None:
        super().__init__()
        self.config = config
        self.grad_checkpointing = False
        self.patch_embed = nn.Conv2d(3, config.dim, config.patch_size, config.patch_size)
        self.bank = CoreBank(config.num_cores, config.dim, config.depth)
        self.blocks = nn.ModuleList(
            CoreBlock(config.dim, config.num_heads, config.hidden_dim, config.attention) for _ in range(config.depth)
        )
        self.norm = nn.LayerNorm(config.dim)
        self.output_proj = None if config.out_dim is None else nn.Linear(config.dim, config.out_dim)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(
        self, images: Float[Tensor, "b 3 height width"], num_cores: int | None = None, *, maps: Sequence[int] = ()
    ) -> VecaOutput:
        """Tokens of some images at a budget.

        Args:
            images: (B, 3, H, W), floating, normalised; any size and aspect in whole patches.
            num_cores: the budget, 1 to the size of the bank; None is all of it. Ordered: the first cores serve.
            maps: blocks whose attention between cores and patches is wanted, both ways, negatives from the end.

        Returns:
            See `VecaOutput`.

        Raises:
            ValueError: images of another shape or size, or elsewhere than the model; a budget outside the bank; or a
                block out of range.
            TypeError: images of another dtype than the parameters (under autocast, of integers or float64), or a budget
                or blocks that are no whole numbers.
        """
        if not isinstance(maps, Iterable):
            raise TypeError(f"expected a sequence of blocks as maps, got {maps!r}: give ({maps!r},)")
        wanted = [self._block_index(layer) for layer in maps]
        trunk = self._run(images, num_cores, self.config.depth, wanted)
        num_cores = trunk.coords[0].shape[-2]
        tokens = self.norm(trunk.tokens)
        cores, patches = tokens.split((num_cores, tokens.shape[1] - num_cores), 1)
        projected = (None, None) if self.output_proj is None else (self.output_proj(t) for t in (cores[:, 0], patches))
        return VecaOutput(
            cores[:, 0],
            cores,
            patches,
            trunk.grid,
            torch.stack([c.expand(tokens.shape[0], -1, -1) for c in trunk.coords]),
            *projected,
            core_maps=tuple(trunk.maps[layer][0] for layer in wanted),
            patch_maps=tuple(trunk.maps[layer][1] for layer in wanted),
        )

    def block_tokens(
        self, images: Tensor, num_cores: int | None = None, *, layer: int = -1, norm: bool = True
    ) -> tuple[Float[Tensor, "b l d"], int, tuple[int, int]]:
        """The tokens that leave one block; blocks after it are not run.

        Args:
            images: as for `forward`.
            num_cores: as for `forward`.
            layer: which block, negatives from the end.
            norm: apply the final norm.

        Returns:
            Tokens (B, C + N, D), cores first; C; and the grid (h, w).
        """
        trunk = self._run(images, num_cores, self._block_index(layer) + 1, [])
        tokens = self.norm(trunk.tokens) if norm else trunk.tokens
        return tokens, trunk.coords[0].shape[-2], trunk.grid

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Keep only each block's input for the backward pass, and compute the rest anew (timm's name for it)."""
        self.grad_checkpointing = enable

    def _run(self, images: Tensor, num_cores: int | None, depth: int, maps: Sequence[int]) -> _Trunk:
        core_tokens, rho = self.bank(self.config.num_cores if num_cores is None else num_cores)
        tokens, grid = self._embed(images, core_tokens)
        rho = rho.to(torch.promote_types(rho.dtype, torch.float32))
        head_dim, count = self.config.dim // self.config.num_heads, core_tokens.shape[0]
        patch_turns = self._patch_rotations(grid, rho)
        coords, found = [], {}
        for layer in range(depth):
            if layer:
                rho = self.bank.move(rho, tokens[:, :count], layer)
            coords.append(rho.tanh())
            core_turns = axial_rotations(coords[-1], head_dim)
            block: CoreBlock = self.blocks[layer]  # pyright: ignore[reportAssignmentType]
            if layer in maps:
                places = (tokens, core_turns, patch_turns)
                found[layer] = (block.core_map(*places), block.patch_map(*places))
            if self.grad_checkpointing and torch.is_grad_enabled():
                tokens = checkpoint(block, tokens, core_turns, patch_turns, use_reentrant=False)
            else:
                tokens = block(tokens, core_turns, patch_turns)
        return _Trunk(tokens, grid, coords, found)

    def _embed(self, images: Tensor, core_tokens: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """The trunk's tokens (B, C + N, D), cores first, and the grid."""
        side, dtype = self.config.patch_size, self.patch_embed.weight.dtype
        if not isinstance(images, Tensor):
            raise TypeError(f"expected images as a tensor (B, 3, H, W), got {type(images).__name__}")
        if images.ndim != 4 or images.shape[1] != 3 or 0 in images.shape:
            raise ValueError(f"expected images of shape (B, 3, H, W), got {tuple(images.shape)}")
        if images.dtype != dtype and not (_autocast_converts(images) and dtype != torch.float64):
            raise TypeError(
                f"expected normalised images of the parameters' {dtype}, got {images.dtype}: convert one of them"
            )
        if images.device != self.patch_embed.weight.device:
            raise ValueError(
                f"images are on {images.device}, the model on {self.patch_embed.weight.device}: move one of them"
            )
        height, width = images.shape[-2:]
        if height % side or width % side:
            if not self.config.pad:
                raise ValueError(
                    f"expected images whose sides are whole patches of {side} px, got {height} x {width}: resize them, "
                    "or make the model with pad=True"
                )
            images = F.pad(images, (0, -width % side, 0, -height % side))
        patches = self.patch_embed(images)  # (B, D, h, w)
        cores = core_tokens.to(patches.dtype).expand(patches.shape[0], -1, -1)
        return torch.cat([cores, patches.flatten(2).transpose(1, 2)], 1), (patches.shape[2], patches.shape[3])

    def _patch_rotations(self, grid: tuple[int, int], like: Tensor) -> Tensor:
        config = self.config
        head_dim = config.dim // config.num_heads
        if not self.training or (config.coord_shift == 0 and config.coord_scale == 1):
            return patch_rotations(grid, head_dim, like.device, like.dtype)
        coords = patch_coordinates(grid, like.device).to(like.dtype)
        return axial_rotations(moved_coordinates(coords, config.coord_shift, config.coord_scale), head_dim)

    def _block_index(self, layer: Any) -> int:
        depth = self.config.depth
        whole = isinstance(layer, numbers.Integral) and not isinstance(layer, bool)
        if not whole or not -depth <= int(layer) < depth:
            raise ValueError(f"this model has {depth} blocks, 0 to {depth - 1}, or negatives: got {layer!r}")
        return int(layer) % depth

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write model.safetensors and config.json, each whole or not at all.

        Args:
            folder: made if it is not there; an earlier checkpoint in it is replaced.

        Raises:
            OSError: the folder cannot be written.
        """
        write_model(self, folder, "veca", asdict(self.config))

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str]) -> Veca:
        """A model that `save_pretrained` wrote, in eval mode and the dtype it was saved in.

        Args:
            folder: holds model.safetensors and config.json.

        Returns:
            The model.

        Raises:
            WeightsError: files that are missing, damaged, of another model, or do not fit each other.
        """
        arguments, state = read_model(folder, "veca")
        return cls._filled(arguments, state, str(folder))

    @classmethod
    def from_official(
        cls, checkpoint: str | os.PathLike[str] | Mapping[str, Tensor], num_heads: int | None = None
    ) -> Veca:
        """A model of the authors' public code.

        Args:
            checkpoint: a .safetensors file, a .pt or .pth file of plain tensors, or a state dict.
            num_heads: where heads are not 64 wide.

        Returns:
            The model in eval mode, its budgets free (the public code has multiples of 8).

        Raises:
            ValueError: tensors of another architecture; those that are missing or too many are named.
            WeightsError: a file that cannot be read, or tensors of other shapes.
        """
        arguments, state = read_official(checkpoint, num_heads)
        return cls._filled(arguments, state, "the official checkpoint")

    @classmethod
    def _filled(cls, arguments: Mapping[str, Any], state: Mapping[str, Tensor], what: str) -> Veca:
        with torch.device("meta"):
            model = cls(VecaConfig(**arguments))
        return fill(model, state, what).eval()


def _autocast_converts(images: Tensor) -> bool:
    kind = images.device.type
    if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        return False
    return images.is_floating_point() and images.dtype != torch.float64
