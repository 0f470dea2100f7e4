"""Say what is installed, what this machine has, and what can be swapped."""

from __future__ import annotations

import json
import platform
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from jsonargparse import ArgumentParser, Namespace

HELP = "say what is installed, what this machine has, and what can be swapped"

HOSTS = {"timm": "timm", "open_clip": "open_clip_torch", "transformers": "transformers", "torchvision": "torchvision"}
"""Import name -> distribution."""

SWAPPABLE = {
    "timm": "Attention, AttentionRope, EvaAttention: ViT, DeiT, DINO v1 to v3, SigLIP, EVA",
    "open_clip": "nn.MultiheadAttention, Attention and timm towers: CLIP, SigLIP, CoCa",
    "transformers": "CLIP, Siglip, Siglip2, Dinov2, Dinov2WithRegisters, DINOv3ViT, ViT",
    "torchvision": "nn.MultiheadAttention: VisionTransformer",
    "torch": "nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer",
}
"""Host -> its attention modules, and the models they make."""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the command's options.

    Args:
        parser: the command's parser.
    """
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(options: Namespace) -> int:
    """Print the report.

    Args:
        options: the parsed options.

    Returns:
        The exit status, 0.
    """
    found = report()
    print(json.dumps(found, indent=2) if options.json else _as_text(found))
    return 0


def report() -> dict[str, Any]:
    """Gather what `selectivit doctor` prints.

    Returns:
        Sections by name, each a dictionary of what is there.

    Example:
        >>> report()["kernels"]["pure PyTorch"]
        'row tiles, on any device'
    """
    import torch

    from selectivit.ops.kernels import cpu, triton

    return {
        "versions": {
            "selectivit": metadata.version("selectivit"),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
        },
        "hosts": {name: _version(name) for name in HOSTS},
        "devices": {
            "cpu": f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads",
            **{f"cuda:{i}": torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())},
            **({"mps": "available"} if torch.backends.mps.is_available() else {}),
        },
        "kernels": {
            "pure PyTorch": "row tiles, on any device",
            "compiled CPU": cpu.status(),
            "Triton": triton.status(),
        },
        "can be swapped": {host: what for host, what in SWAPPABLE.items() if find_spec(host)},
        "weights": _weights(),
    }


def _version(host: str) -> str:
    """Give a host's version, or how to get it; without importing it, which may take seconds."""
    if find_spec(host) is None:
        extra = "all" if host == "torchvision" else host
        return f'not installed: pip install "selectivit[{extra}]"'
    return metadata.version(HOSTS[host])


def _weights() -> dict[str, str]:
    from selectivit.models.cache import cache_folder
    from selectivit.models.dinov2_wheel import FILE

    there = (cache_folder() / FILE).is_file()
    return {
        "cache": str(cache_folder()),
        "dinov2-small": "in the cache" if there else "not in the cache: fetched when first used (90 MB)",
    }


def _as_text(found: dict[str, dict[str, str]]) -> str:
    width = max(len(key) for section in found.values() for key in section)
    lines = []
    for title, section in found.items():
        lines += [title, *(f"  {key:<{width}}  {value}" for key, value in section.items()), ""]
    return "\n".join(lines).rstrip()
