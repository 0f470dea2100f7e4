"""Whether a self-distillation still tells photos apart: entropies of the teacher's outputs, spread of its features."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

PATIENCE = 10  # steps on end
UNIFORM, BLIND, SAME = 0.995, 0.01, 0.02
"""A share of ln K from which on outputs are uniform; a share of information below which they do not depend on the
photo; a spread below which features are the same."""


def batch_sums(outputs: Tensor, probabilities: Tensor, features: Tensor) -> Tensor:
    """What a part of a batch adds to the step's sums, for parts and processes to add up.

    Args:
        outputs: (B, K), the teacher's.
        probabilities: (B, K), the same after centring and softmax.
        features: (B, C), its class tokens.

    Returns:
        (2 K + C + 2,): sums of outputs, of probabilities, of unit features, of entropies in nats, and B.
    """
    entropies = torch.special.entr(probabilities).sum(-1)
    units = F.normalize(features.float(), dim=-1)
    sums = [
        outputs.sum(0),
        probabilities.sum(0),
        units.sum(0),
        entropies.sum().view(1),
        entropies.new_tensor([len(units)]),
    ]
    return torch.cat(sums)


@dataclass(frozen=True)
class Look:
    """What the teacher does with the photos of a step.

    Args:
        mean_output: (K,).
        teacher_entropy: mean over photos of its output's entropy, as a share of ln K: 1 is uniform.
        mean_entropy: the entropy of the mean output, likewise; it is larger where photos get different outputs.
        information: how much the output says about which photo it was, in [0, 1]: the difference of the two entropies,
            as a share of the most that so many photos and outputs allow.
        feature_spread: √(1 − ‖mean of the unit features‖²): 0 says that all photos have the same features.
    """

    mean_output: Tensor
    teacher_entropy: float
    mean_entropy: float
    information: float
    feature_spread: float

    @classmethod
    def at(cls, sums: Tensor, out_dim: int) -> Look:
        """Read sums of a whole step.

        Args:
            sums: as `batch_sums` gives them, added up.
            out_dim: K.

        Returns:
            The look.

        Example:
            >>> same = torch.eye(4)[:1].expand(3, 4)
            >>> look = Look.at(batch_sums(same, same, same), 4)
            >>> look.teacher_entropy, look.information, look.feature_spread
            (0.0, 0.0, 0.0)
        """
        count = sums[-1]
        outputs, chances, units = (sums[:-2] / count).split([out_dim, out_dim, len(sums) - 2 - 2 * out_dim])
        spread = (1 - units.double().square().sum()).clamp_min(0).sqrt()
        most = math.log(out_dim) if out_dim > 1 else 1.0
        values = torch.stack([sums[-2] / count / most, torch.special.entr(chances).sum() / most, spread.float()])
        entropy, mean_entropy, spread = values.tolist()
        allowed = math.log(max(2.0, min(out_dim, float(count)))) / most
        return cls(outputs, entropy, mean_entropy, max(0.0, mean_entropy - entropy) / allowed, spread)


@dataclass
class CollapseWatch:
    """Looks step by step, and says so once when the training collapses.

    Args:
        grace: steps in the beginning that are not judged: random weights hardly tell photos apart.

    Example:
        >>> watch = CollapseWatch(grace=1)
        >>> fine = Look(torch.zeros(4), 0.5, mean_entropy=0.9, information=0.4, feature_spread=0.6)
        >>> watch.judge(fine, 0), watch.judge(fine, 5)
        ('', '')
    """

    grace: int
    lasting: dict[str, int] = field(default_factory=dict)
    told: list[str] = field(default_factory=list)

    def judge(self, look: Look, step: int) -> str:
        """Take a look into account.

        Args:
            look: of the step.
            step: counted from 0.

        Returns:
            What is wrong and what may help, once it lasts, and once; else empty.
        """
        for kind, (bad, words) in _signs(look).items():
            self.lasting[kind] = self.lasting.get(kind, 0) + 1 if bad else 0
            if step >= self.grace and self.lasting[kind] >= PATIENCE and kind not in self.told:
                self.told.append(kind)
                return f"step {step + 1}: {words}"
        return ""


def _signs(look: Look) -> dict[str, tuple[bool, str]]:
    uniform = look.teacher_entropy > UNIFORM
    return {
        "uniform": (
            uniform,
            f"the teacher's outputs are nearly uniform (entropy {look.teacher_entropy:.4f} of ln K), so they teach "
            "nothing: a lower teacher temperature may help, in a new folder",
        ),
        "blind": (
            look.information < BLIND and not uniform,
            "the teacher gives all photos nearly one and the same output (information "
            f"{look.information:.4f} of what is possible): a lower learning rate, a longer warm-up, a larger "
            "batch or another teacher temperature may help, in a new folder",
        ),
        "same": (
            look.feature_spread < SAME,
            f"the features of all photos are nearly the same (spread {look.feature_spread:.4f}, 1 is the most): a "
            "lower learning rate, a longer warm-up or a larger batch may help, in a new folder",
        ),
    }
