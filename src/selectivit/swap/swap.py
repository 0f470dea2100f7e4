"""Swap softmax for another rule inside the attention of a pretrained model, and back."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Protocol

from torch import Tensor, nn

from selectivit.ops.selective import AttentionRule
from selectivit.swap.attend import STATE, Selective
from selectivit.swap.fingerprint import check_fits
from selectivit.swap.install import install, is_current, uninstall
from selectivit.swap.sites import Site, as_index, find_sites, unwrap


class HasFactors(Protocol):
    """A calibration: one factor on the scores per head, for each attention module by name."""

    @property
    def factors(self) -> Mapping[str, Tensor]:
        """From module names to factors of shape (heads,)."""
        ...


class Swap:
    """A swap in force: what was replaced, what was skipped and why, and the way back.

    Leaving the `with` block, or `restore`, puts back the very objects that were there. Swaps over swaps are
    restored in the reverse order.
    """

    def __init__(self, installed: Sequence[tuple[Site, Selective]], skipped: Mapping[str, str]):
        self._installed = list(installed)
        self.sites: list[Site] = [site for site, _ in installed]
        self.replaced: tuple[str, ...] = tuple(site.name for site in self.sites)
        self.skipped: dict[str, str] = dict(skipped)

    def restore(self) -> None:
        """Put the host's attention back; a second call does nothing.

        Raises:
            RuntimeError: when a later swap lies over this one.
        """
        self._installed = [(site, state) for site, state in self._installed if state.found]  # not yet put back
        covered = [site.name for site, state in self._installed if not is_current(site.module, state)]
        if covered:
            raise RuntimeError(
                f"another swap lies over {', '.join(covered)}: restore the later swaps first, the last one made before "
                "the others"
            )
        while self._installed:
            uninstall(self._installed.pop()[1])

    def __enter__(self) -> "Swap":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()

    def __repr__(self) -> str:
        return f"Swap(replaced={self.replaced}, skipped={self.skipped})"


def swap_attention(
    model: nn.Module,
    normalizer: str = "entmax",
    alpha: float | Tensor = 1.5,
    scores: str = "qk",
    layers: int | Sequence[int] | None = -1,
    *,
    scale: float | Tensor | HasFactors | None = None,
    temperature: float = 1.0,
    combine: str = "mean",
    seed: int = 0,
) -> Swap:
    """Replace softmax in the attention of a model's image tower, without training.

    Works on timm (ViT, DeiT, DINO v1 to v3, SigLIP, EVA), open_clip, transformers (CLIP, SigLIP, DINOv2 and v3, ViT),
    torchvision's ViT and plain `nn.MultiheadAttention`. Parameters, buffers and state-dict keys stay as they are;
    the text tower and pooling heads are left alone. Masks, dropout, norms of q and k, rotary embeddings and gates
    stay the host's.

    Args:
        model: the model, changed in place until the swap is restored.
        normalizer: "entmax", "sparsemax", "softmax" or "random_mask".
        alpha: entmax's α, at least 1; 1 is softmax, 2 is sparsemax; a number or one per head (heads,).
        scores: "qk", "qq", "kk", "vv", a sum such as "qq+kk", or "v" (no mixing).
        layers: -1 the last attention layer, -n or n the last n, a list those (negatives count from the end), None all.
        scale: multiplies the scores on top of the host's 1/sqrt(d): a number, one per head (heads,), or a calibration.
        temperature: divides the scores.
        combine: how the probabilities of a sum of score sources are joined, "mean" or "sum".
        seed: of the random mask, which differs between layers, heads and the images of a batch.

    Returns:
        The swap: a context manager and a handle.

    Raises:
        ValueError: for an unknown name or layer, or when nothing matched; the text lists what was found.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.TransformerEncoderLayer(16, 2, batch_first=True).eval()
        >>> with swap_attention(model, alpha=1.5) as swap:
        ...     swap.replaced
        ('self_attn',)

    Source: training-free swap of softmax in frozen models; α-entmax is Peters et al. 2019 (arXiv:1905.05702).
    """
    plain = scale if scale is None or isinstance(scale, (int, float, Tensor)) else None
    rule = AttentionRule(
        normalizer=normalizer,
        alpha=alpha,
        scores=scores,
        scale=plain,
        temperature=temperature,
        combine=combine,
        seed=seed,
    )
    found, skipped = find_sites(model)
    if not found:
        raise ValueError(nothing_found(model, skipped))
    if scale is not None and not isinstance(scale, (int, float, Tensor)):
        check_fits(scale, rule, model, found)
    places = {site.name: place for place, site in enumerate(found)}
    chosen: list[tuple[Site, AttentionRule]] = []
    for site in select_layers(found, layers):
        if site.cross and rule.scores != "qk":
            skipped[site.name] = f"cross-attention has no {rule.scores!r} scores: queries and keys differ in length"
        else:
            chosen.append((site, replace(_rule_for(site, rule, scale), layer=places[site.name])))
    if not chosen:
        raise ValueError(nothing_found(model, skipped))
    return Swap([(site, install(site, rule)) for site, rule in chosen], skipped)


def restore_attention(model: nn.Module) -> tuple[str, ...]:
    """Put the host's own attention back wherever a swap is found in a model, whoever made it.

    A copy of a swapped model, by `copy.deepcopy` or from a pickle, is swapped as well and has no handle: this is its
    way back. Handles of swaps that it took away have nothing left to restore.

    Args:
        model: swapped any number of times, or not at all.

    Returns:
        The names of the modules that were put back.

    Example:
        >>> import copy
        >>> from torch import nn
        >>> model = nn.TransformerEncoderLayer(16, 2, batch_first=True).eval()
        >>> with swap_attention(model, alpha=1.5):
        ...     twin = copy.deepcopy(model)
        >>> restore_attention(twin), restore_attention(model)
        (('self_attn',), ())
    """
    names = []
    for name, module in list(unwrap(model).named_modules()):
        while (state := vars(module).get(STATE)) is not None and state.found:
            uninstall(state)
            names.append(name)
    return tuple(dict.fromkeys(names))


def select_layers(sites: Sequence[Site], layers: int | Sequence[int] | None) -> list[Site]:
    """The sites that `layers` names: None all, an int the last that many, a list those.

    Raises:
        ValueError: for 0, an empty list, or an index out of range; the text says how many there are.
    """
    count = len(sites)
    if layers is None:
        return list(sites)
    if isinstance(layers, (bool, str)):
        raise ValueError(f"layers must be an int, a list of ints or None, got {layers!r}")
    last = as_index(layers)
    if last is not None:
        if not 1 <= abs(last) <= count:
            raise ValueError(f"layers={last}: expected the last 1 to {count} layers, -1 to -{count}, or None for all")
        return list(sites[-abs(last) :])
    if not isinstance(layers, Iterable):
        raise ValueError(f"layers must be an int, a list of ints or None, got {layers!r}")
    given = list(layers)
    if not given:
        raise ValueError(f"layers is empty: name some of the {count} layers, 0 to {count - 1}, or pass None for all")
    indices = [index for index in map(as_index, given) if index is not None]
    if len(indices) != len(given):
        raise ValueError(f"layers must hold ints, got {[index for index in given if as_index(index) is None]}")
    outside = [index for index in indices if not -count <= index < count]
    if outside:
        raise ValueError(
            f"layers {outside} are out of range: this model has {count} attention layers, 0 to {count - 1}"
        )
    return [sites[index] for index in sorted({index % count for index in indices})]


def _rule_for(site: Site, rule: AttentionRule, scale: float | Tensor | HasFactors | None) -> AttentionRule:
    """The rule with the factors of this site, checked against its heads."""
    factors = rule.scale
    if scale is not None and not isinstance(scale, (int, float, Tensor)):
        if site.name not in scale.factors:
            known = ", ".join(scale.factors)
            raise ValueError(f"the calibration has no factors for {site.name!r}; it has {known}")
        factors = scale.factors[site.name]
    alpha, factors = (_per_head(value, what, site) for value, what in ((rule.alpha, "alpha"), (factors, "scale")))
    return replace(rule, alpha=alpha, scale=factors)


def _per_head(value: Any, what: str, site: Site) -> Any:
    """A tensor of one number per head as (heads,), also where it comes as the operators take it, (heads, 1, 1)."""
    if not isinstance(value, Tensor) or value.ndim == 0:
        return value
    if tuple(value.shape) not in ((site.num_heads,), (site.num_heads, 1, 1)):
        raise ValueError(
            f"{what} has shape {tuple(value.shape)}, expected ({site.num_heads},): "
            f"{site.name} has {site.num_heads} heads"
        )
    return value.reshape(-1)


def nothing_found(model: nn.Module, skipped: Mapping[str, str]) -> str:
    """The error's text for a model without attention that can be swapped: what was found, and why it is left alone."""
    kind = type(model).__name__
    if not skipped:
        return f"no attention found in {kind}: expected a timm, open_clip, transformers or torch Vision Transformer"
    names: dict[str, list[str]] = {}
    for name, why in skipped.items():
        names.setdefault(why, []).append(name)
    more = {why: f" and {len(some) - 1} more" if len(some) > 1 else "" for why, some in names.items()}
    found = "\n".join(f"  {some[0]}{more[why]}: {why}" for why, some in names.items())
    return f"no attention that can be swapped in {kind}; found, and left alone:\n{found}"
