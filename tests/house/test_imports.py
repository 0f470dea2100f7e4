"""The rooms: imports go leftward only, hosts stay in their files, and `import selectivit` is light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import selectivit

ROOT = Path(selectivit.__file__).parent
ORDER = {
    "ops": 0,
    "layers": 1,
    "models": 2,
    "swap": 2,
    "features": 3,
    "data": 3,
    "openvocab": 4,
    "train": 4,
    "export": 4,
    "eval": 4,
    "vis": 4,
    "demo": 5,
    "cli": 6,
    "__main__": 7,
}
HOSTS = {
    "timm": {"swap/timm.py", "models"},
    "open_clip": {"swap/open_clip.py", "models"},
    "transformers": {"swap/transformers.py", "models"},
    "torchvision": {"swap/torch_mha.py", "data"},
    "matplotlib": {"vis"},
    "rich": {"cli"},
    "umap": {"vis/umap.py"},
    "jsonargparse": {"cli"},
    "onnx": {"models"},
    "onnxruntime": {"export"},
    "PIL": {"data", "vis", "cli", "demo"},
    "gradio": {"demo"},
    "lightning": {"train"},
    "lightly": {"train", "data/multi_crop.py"},
    "datasets": {"data/hub_dataset.py"},
    "triton": {f"ops/kernels/triton_{part}.py" for part in ("blocks", "forward", "backward")},
}
FILES = sorted(ROOT.rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Absolute names of all modules that a file imports, at the top or inside functions."""
    package = ("selectivit", *path.relative_to(ROOT).parts[:-1])
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return names


def room(parts: tuple[str, ...]) -> str:
    return parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_leftward(path):
    here = room(path.relative_to(ROOT).parts)
    if here == "__init__":
        return
    assert here in ORDER, f"{path} is in no known room"
    for name in imported(path):
        if not name.startswith("selectivit."):
            continue
        there = room(tuple(name.split(".")[1:]))
        if there in ("__version__", here):
            continue
        assert ORDER[there] < ORDER[here], f"{path.relative_to(ROOT)} imports {name}: {here} may not import {there}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_hosts_stay_in_their_files(path):
    relative = path.relative_to(ROOT)
    for name in imported(path):
        allowed = HOSTS.get(name.split(".")[0])
        if allowed is not None:
            assert str(relative) in allowed or relative.parts[0] in allowed, f"{relative} imports {name}"


def test_the_import_reader_sees_relative_and_nested_imports():
    assert "selectivit.ops.threshold.solve_rows" in imported(ROOT / "ops" / "entmax_autograd.py")


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_import_is_light():
    heavy = [*HOSTS, "pytorch_lightning", "lightly", "pandas", "sklearn"]
    heavy.remove("PIL")  # torch's own start-up may look for it
    out = run(f"import selectivit, sys; print([m for m in {heavy!r} if m in sys.modules])")
    assert out.strip() == "[]"


def test_import_costs_little_over_torch():
    # The process's own seconds, and the least of three: what else the machine does is not the import's doing.
    code = "import torch, time; t = time.process_time(); import selectivit; print(time.process_time() - t)"
    assert min(float(run(code)) for _ in range(3)) < 0.3
