"""`load_clip`: a pretrained CLIP or SigLIP with both its towers, and the tokenizer of its texts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from selectivit.models.cache import WeightsError
from selectivit.models.hub import use_hub
from selectivit.models.names import parse_name
from selectivit.models.weights import load_model

MERGES = "bpe_merges.txt.gz"  # beside the weights: the byte pairs of a smaller vocabulary for open_clip's own tokenizer


def load_clip(
    name: str | os.PathLike[str],
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    device: str | torch.device = "cpu",
) -> tuple[nn.Module, Any]:
    """Load a CLIP or SigLIP and the tokenizer that goes with it.

    Args:
        name: an open_clip model and tag ("ViT-B-16/openai", also "open_clip:ViT-B-16/openai"), a transformers id
            ("openai/clip-vit-base-patch16"), or a local folder written by either; one of open_clip may hold
            `bpe_merges.txt.gz`, the byte pairs of a vocabulary of its own.
        cache_dir: folder for fetched weights; None leaves it to each library's own setting.
        device: where the model is put.

    Returns:
        The library's own model in eval mode, and its tokenizer.

    Raises:
        ValueError: an unknown name; close ones are named.
        WeightsError: weights or a tokenizer that cannot be fetched or read.
        ImportError: the library is not installed; the text names the extra.

    Example:
        >>> model, tokenizer = load_clip("ViT-B-16/openai")  # doctest: +SKIP
    """
    full = _with_prefix(os.fspath(name))
    source, rest = parse_name(full)
    if source not in ("open_clip", "transformers", "folder"):
        raise ValueError(
            f"{name} is no model of images and texts: expected one of open_clip (ViT-B-16/openai), of transformers "
            "(openai/clip-vit-base-patch16), or a local folder of either"
        )
    model = load_model(full, cache_dir=cache_dir, device=device)
    cache = None if cache_dir is None else os.fspath(cache_dir)
    with use_hub() as hub:
        try:
            return model, _tokenizer(source, rest, cache)
        except ImportError:
            raise
        except Exception as error:  # the libraries raise OSError, ValueError, KeyError and more for the same troubles
            why = hub.why_not or " ".join(str(error).split())[:400] or type(error).__name__
            raise WeightsError(
                f"the weights of {name} are here, its tokenizer is not ({why}): put the tokenizer's files beside the "
                "weights, or pass a pair (model, tokenizer)"
            ) from error


def _with_prefix(name: str) -> str:
    """Tell open_clip's "ViT-B-16/openai" from a transformers id of the same form: an architecture stands before /."""
    architecture, slash, tag = name.strip().partition("/")
    if not slash or not tag or ":" in name or Path(name).expanduser().exists():
        return name
    try:
        import open_clip
    except ModuleNotFoundError:
        return name
    return f"open_clip:{name.strip()}" if architecture in open_clip.list_models() else name


def _tokenizer(source: str, rest: str, cache_dir: str | None) -> Any:
    folder = Path(rest)
    if source == "open_clip" or (source == "folder" and (folder / "open_clip_config.json").is_file()):
        import open_clip

        if source == "folder":
            merges = folder / MERGES
            own: dict[str, Any] = {"bpe_path": str(merges)} if merges.is_file() else {}
            return open_clip.get_tokenizer(f"local-dir:{folder}", **own)
        has_schema = rest.startswith(("hf-hub:", "local-dir:"))
        return open_clip.get_tokenizer(rest if has_schema else rest.partition("/")[0], cache_dir=cache_dir)
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(rest, cache_dir=cache_dir, trust_remote_code=False)
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise ValueError("no vocabulary beside the weights")  # transformers makes an empty tokenizer without a word
    return tokenizer
