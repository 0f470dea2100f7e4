"""A model's features as a program of torch.export: one graph for every batch, image size and budget."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from selectivit.features import Features, features
from selectivit.models.veca import Veca
from selectivit.ops.graph import plain_operators
from selectivit.swap.attend import STATE
from selectivit.swap.sites import find_tower, unwrap

OUTPUTS = ("map", "cls", "registers", "cores")


class FeatureGraph(nn.Module):
    """What is exported: images in, a dictionary of features out.

    Args:
        model: an image tower, or a VECA model.
        layer: the block whose tokens are taken.
        norm: pass them through the final norm.
        num_cores: a VECA model's fixed budget, or None.

    Example:
        >>> from selectivit.models.veca_config import VecaConfig
        >>> veca = Veca(VecaConfig(dim=16, depth=1, num_heads=2, hidden_dim=24, num_cores=4)).eval()
        >>> list(FeatureGraph(veca)(torch.randn(1, 3, 32, 32)))
        ['map', 'cls', 'cores']
    """

    def __init__(self, model: nn.Module, layer: int = -1, norm: bool = True, num_cores: int | None = None) -> None:
        super().__init__()
        self.model, self.layer, self.norm, self.num_cores = model, layer, norm, num_cores

    def forward(self, images: Tensor, num_cores: int | None = None) -> dict[str, Tensor]:
        """Compute.

        Args:
            images: (B, 3, H, W) in whole patches.
            num_cores: a VECA model's budget where it is an input.

        Returns:
            By name, those of `OUTPUTS` that the model has.
        """
        budget = self.num_cores if num_cores is None else num_cores
        return named(features(self.model, images, layer=self.layer, norm=self.norm, num_cores=budget))


def named(found: Features) -> dict[str, Tensor]:
    """Features by the names of a file's outputs, those that the model has.

    Args:
        found: of any model.

    Returns:
        `map` (B, C, h, w) and, where there are any, `cls` (B, C), `registers` (B, R, C), `cores` (B, C', C).

    Example:
        >>> tokens = torch.zeros(1, 6, 8)
        >>> list(named(Features(torch.zeros(1, 8, 2, 3), tokens, tokens[:, 0], None, None, (2, 3))))
        ['map', 'cls']
    """
    tensors = {name: getattr(found, name) for name in OUTPUTS}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def tower_of(model: nn.Module) -> nn.Module:
    """The part of a model that features come from, checked for what no file can hold.

    Args:
        model: any that `features` takes.

    Returns:
        The image tower, or the VECA model.

    Raises:
        ValueError: a model in training mode, of another dtype than float32, elsewhere than on the CPU, without a tower,
            or swapped for a rule that has no graph.
    """
    ours = [module for module in unwrap(model).modules() if isinstance(module, Veca)]
    found = None if ours else find_tower(model)
    tower = ours[0] if ours else None if found is None else found.module
    if tower is None:
        raise ValueError(
            f"no image tower found in {type(model).__name__}: expected a Vision Transformer of timm, open_clip, "
            "transformers or torchvision, or a VECA model"
        )
    if any(module.training for module in tower.modules()):
        raise ValueError("the model is in training mode, its dropout would become part of the file: call model.eval()")
    others = {str(p.dtype) for p in tower.parameters() if p.dtype != torch.float32}
    if others:
        raise ValueError(f"expected parameters in float32, got {', '.join(sorted(others))}: call model.float()")
    devices = {p.device.type for p in tower.parameters()} - {"cpu"}
    if devices:
        raise ValueError(f"expected a model on the CPU, got one on {', '.join(devices)}: call model.cpu()")
    for name, module in tower.named_modules():
        rule = getattr(vars(module).get(STATE), "rule", None)
        if rule is not None and rule.normalizer == "random_mask":
            raise ValueError(
                f"{name} attends under a random mask, a control whose draws no file can repeat: restore it, or swap "
                "in entmax, sparsemax or softmax"
            )
        if rule is not None and isinstance(rule.alpha, Tensor) and bool((rule.alpha > 2).any()):
            raise ValueError(
                f"{name} has an alpha per head of which the largest is {rule.alpha.max():g}: exported, an alpha per "
                "head is at most 2; one number for all heads may be larger"
            )
    return tower


def feature_program(
    graph: FeatureGraph, example: Tensor, patch: int, *, dynamic: bool, num_cores: int | None
) -> torch.export.ExportedProgram:
    """Trace.

    Args:
        graph: what to trace.
        example: (B, 3, H, W) images; with `dynamic`, neither 1 image nor of the model's own size.
        patch: side of a patch in pixels.
        dynamic: whether batch, height and width are free; then each side has two patches or more.
        num_cores: the size of the bank where the budget is an input, else None.

    Returns:
        The program, without the parameters that it does not use.

    Raises:
        Exception: whatever torch raises where it cannot.
    """
    batch, rows, columns = (torch.export.Dim(n, min=m) for n, m in (("batch", 1), ("rows", 2), ("columns", 2)))
    sizes: Any = {0: batch, 2: patch * rows, 3: patch * columns} if dynamic else {}
    shapes: dict[str, Any] = {"images": sizes}
    given: dict[str, Any] = {}
    if num_cores is not None:
        given["num_cores"] = max(2, num_cores - 1)
        shapes["num_cores"] = torch.export.Dim.DYNAMIC(min=1, max=num_cores)  # pyright: ignore[reportCallIssue]
    from torch.utils._sympy.value_ranges import ValueRanges  # with sympy, which takes its time

    torch.compiler.reset()  # the tracer of entmax's loop would take sizes of an earlier export for constants
    with torch.no_grad(), plain_operators():
        program = torch.export.export(graph, (example,), given, dynamic_shapes=shapes, strict=False)
    _drop_unused(program)
    if num_cores is not None:  # tracers take a size of 1 for a case of its own; nothing in VECA is, and `check` runs it
        (budget,) = (node.meta["val"].node.expr for node in program.graph.nodes if node.name == "num_cores")
        program.range_constraints[budget] = ValueRanges(1, num_cores)
        program._guards_code = [guard for guard in program._guards_code if guard != "L['num_cores'] >= 2"]
    # Hosts resize their position embeddings unless the grid is their own; what was traced resizes always, which leaves
    # the embeddings of their own grid as they are. So that grid, which the guards exclude, is welcome too.
    program._guards_code = [guard for guard in program._guards_code if "!=" not in guard]
    return program


def _drop_unused(program: torch.export.ExportedProgram) -> None:
    """Take out the operators and parameters that no output needs: blocks after the one that was asked for, pools."""
    from torch.export.graph_signature import InputKind

    graph = program.graph_module.graph
    for node in list(graph.nodes):  # of dtypes, which would keep all that they look at
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            graph.erase_node(node)
    graph.eliminate_dead_code(lambda node: node.is_impure(impure_random=False))  # attention might draw, for dropout
    unused = {node.name: node for node in graph.nodes if node.op == "placeholder" and not node.users}
    signature = program.graph_signature
    kept = []
    for spec in signature.input_specs:
        node = unused.get(getattr(spec.arg, "name", ""))
        if node is None or spec.kind not in (InputKind.PARAMETER, InputKind.BUFFER):
            kept.append(spec)
            continue
        graph.erase_node(node)
        program.state_dict.pop(str(spec.target), None)
    signature.input_specs[:] = kept
    program.graph_module.recompile()
