"""Our own attention, which is trained under a rule: swaps and recordings reach it as they reach a host's."""

from torch import Tensor, nn

from selectivit.layers.selective_attention import SelectiveAttention
from selectivit.swap.attend import attend
from selectivit.swap.sites import Edit, Site


class SwappedSelectiveAttention(SelectiveAttention):
    """`SelectiveAttention` under the rule that a swap put on it; under its own where a recording alone listens."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None) -> Tensor:
        """As the layer's own, with the swap's rule."""
        return attend(self, q, k, v, scale=q.shape[-1] ** -0.5, attn_mask=attn_mask)


def is_tower(module: nn.Module) -> bool:
    """No layer is a whole model."""
    return False


def site(name: str, module: nn.Module, parents: tuple[nn.Module, ...]) -> Site | str | None:
    """The site of our attention module; None for anything else."""
    if not isinstance(module, SelectiveAttention):
        return None
    edit = Edit(module, "__class__", SwappedSelectiveAttention)
    return Site(name, module, module.num_heads, "selectivit", (edit,), projection=module.proj, native=module.rule)
