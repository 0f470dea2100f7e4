"""Labels, their synonyms and prompt templates, and their features in the space of images and texts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from selectivit.swap.sites import host_of, unwrap

PROMPTS_AT_ONCE = 256


@dataclass
class _Kept:
    """Features of words under templates, of one state of a model and one tokenizer."""

    state: tuple[Any, ...]
    tokenizer: Any
    features: dict[tuple[tuple[str, ...], str], Tensor] = field(default_factory=dict)


_CACHE: WeakKeyDictionary[nn.Module, _Kept] = WeakKeyDictionary()


@dataclass(frozen=True)
class Label:
    """A class: its name, and the words that stand for it.

    Args:
        name: the first of the words.
        words: synonyms; the best of them counts.
    """

    name: str
    words: tuple[str, ...]


def parse_labels(labels: Sequence[str]) -> tuple[Label, ...]:
    """Read labels, whose synonyms stand between bars.

    Args:
        labels: such as ["road", "person|man|woman"], in any script.

    Returns:
        The labels in their order.

    Raises:
        ValueError: none, an empty one, or a word that comes twice.

    Example:
        >>> parse_labels(["road", "person|man"])[1]
        Label(name='person', words=('person', 'man'))
    """
    if isinstance(labels, str):
        raise ValueError(f"expected a list of labels, got one string: {labels!r}; write ['road', 'car|truck']")
    found = []
    for label in labels:
        words = tuple(" ".join(word.split()) for word in label.split("|")) if isinstance(label, str) else ()
        if not words or not all(words):
            raise ValueError(f"expected labels such as 'road' or 'person|man|woman', got {label!r}")
        found.append(Label(words[0], words))
    if not found:
        raise ValueError("expected at least one label, got none")
    counts = Counter(word.casefold() for label in found for word in label.words)
    twice = [word for word, count in counts.items() if count > 1]
    if twice:
        raise ValueError(f"labels and synonyms must differ: {', '.join(map(repr, twice[:5]))} came more than once")
    return tuple(found)


@cache
def _template_file() -> Mapping[str, Any]:
    return json.loads(files("selectivit.openvocab").joinpath("templates.json").read_text(encoding="utf-8"))


def find_templates(templates: str | Sequence[str]) -> tuple[str, ...]:
    """Prompt templates by name, or as they are.

    Args:
        templates: "imagenet80", "imagenet7", "photo", "none", or templates of your own, each with one {}.

    Returns:
        The templates.

    Raises:
        ValueError: no such name, or a template without its {}.

    Example:
        >>> find_templates("photo"), len(find_templates("imagenet80"))
        (('a photo of a {}.',), 80)
    """
    if isinstance(templates, str):
        known = [name for name in _template_file() if name != "source"]
        if templates not in known:
            raise ValueError(f"unknown templates {templates!r}: use one of {', '.join(known)}, or a list of your own")
        return tuple(_template_file()[templates])
    for template in templates:
        if not isinstance(template, str) or template.count("{}") != 1:
            raise ValueError(f"expected templates with one {{}}, such as 'a photo of a {{}}.', got {template!r}")
    if not templates:
        raise ValueError("expected at least one template, got none; 'none' is the bare label")
    return tuple(templates)


def text_features(model: nn.Module, tokenizer: Any, words: Sequence[str], templates: Sequence[str]) -> Tensor:
    """Features of words: the mean over templates of unit vectors, as a unit vector.

    They are kept for as long as the model lives, and made anew when its weights, its device, the tokenizer or the
    templates change.

    Args:
        model: a CLIP or SigLIP.
        tokenizer: its tokenizer.
        words: what stands in the templates.
        templates: with one {} each.

    Returns:
        (words, E) float32, on the model's device.

    Raises:
        ValueError: a tokenizer of another model.
    """
    whole: Any = unwrap(model)
    state, kept = _state(whole), _CACHE.get(whole)
    if kept is None or kept.state != state or kept.tokenizer is not tokenizer:
        kept = _CACHE[whole] = _Kept(state, tokenizer)
    templates = tuple(templates)
    missing = [word for word in words if (templates, word) not in kept.features]
    per_call = max(1, PROMPTS_AT_ONCE // len(templates))
    for start in range(0, len(missing), per_call):
        some = missing[start : start + per_call]
        prompts = [template.replace("{}", word) for word in some for template in templates]
        with torch.no_grad():
            features = host_of(whole).encode_text(whole, tokenizer, prompts).float()
        means = F.normalize(F.normalize(features, dim=-1).unflatten(0, (len(some), -1)).mean(1), dim=-1)
        kept.features.update({(templates, word): mean for word, mean in zip(some, means, strict=True)})
    return torch.stack([kept.features[templates, word] for word in words])


def _state(model: nn.Module) -> tuple[Any, ...]:
    """Changes when weights are written to, replaced, cast or moved."""
    parameters = list(model.parameters())
    versions = sum(0 if p.is_inference() else p._version for p in parameters)
    return versions, [(id(p), p.data_ptr()) for p in parameters], parameters[0].dtype, parameters[0].device


def check_different(features: Tensor, words: Sequence[str]) -> None:
    """Refuse features that say nothing, or the same of two words.

    Args:
        features: (words, E), unit vectors.
        words: what they are of.

    Raises:
        ValueError: NaN or infinity, or words that the tokenizer cannot tell apart.

    Example:
        >>> check_different(torch.eye(2), ["cat", "dog"])
    """
    if not features.isfinite().all():
        raise ValueError("the text tower gives NaN or infinite features: check the model's weights and dtype")
    alike = (features @ features.T).triu(1) > 1 - 1e-6
    if alike.any():
        one, other = (words[i] for i in alike.nonzero()[0].tolist())
        raise ValueError(
            f"the tokenizer and text tower cannot tell {one!r} from {other!r}: too long, in a script they do not know, "
            "or different in letter case alone"
        )
