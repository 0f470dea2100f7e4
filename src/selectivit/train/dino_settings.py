"""What decides the result of DINO's pretraining; the defaults are those of the authors' code."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from selectivit.data.multi_crop import Crops
from selectivit.train.settings import PRECISIONS

PREFIX = "dino_vit"
KNN = ("auto", "on", "off")
LEAST_TEMPERATURE = 0.02
PRESETS: dict[str, dict[str, Any]] = {
    "cls": {},
    "register4": {"registers": 4},
    "specialization": {"specialization": "third"},
    "entmax15": {"attention": "entmax15"},
}
"""Name -> what differs from DINO's ViT-S/16: the four models that arXiv 2605.23868 compares after 200 epochs each."""


@dataclass(frozen=True)
class DinoSettings:
    """What decides the weights that come out.

    Args:
        model: dino_vit_{tiny,small,base}_patch{8,16}.
        attention: as for `DinoVitConfig`.
        registers: likewise.
        specialization: likewise.
        drop_path: likewise; of the student.
        crops: what is cut out of a photo.
        epochs: passes over the photos.
        steps: optimiser steps in place of those of the epochs; all that is told in epochs is then stretched to them.
        batch_size: photos a step, of all processes together.
        accumulate: parts that a step's batch is computed in, one after the other, where memory is short.
        lr: peak learning rate for a batch of 256; the batch's own is lr · batch_size / 256.
        min_lr: the learning rate at the end, whatever the batch.
        warmup_epochs: epochs over which the learning rate rises in a straight line.
        weight_decay: of all but biases and norms, at the start.
        weight_decay_end: and at the end of its cosine.
        clip: largest norm of each parameter's own gradient; 0 does not clip.
        freeze_last_layer: epochs in which the head's last layer stays as it is.
        teacher_momentum: at the start of its cosine; it ends at 1.
        student_temperature: of the student's softmax.
        teacher_temperature: of the teacher's, after its warm-up.
        warmup_teacher_temperature: at the start.
        warmup_teacher_epochs: epochs over which it changes in a straight line.
        center_momentum: of the running mean that is taken from the teacher's outputs.
        out_dim: outputs of the head.
        hidden_dim: width of the head's hidden layers.
        bottleneck_dim: width in front of the head's last layer.
        norm_last_layer: keep the norms of the last layer's weights at 1.
        precision: "bf16", "float32", or "auto": bf16 where the device computes in it.
        knn: k-NN on photos kept out of training: "auto" where the photos lie in one sub-folder a class, "on", "off".
        knn_k: neighbours.
        knn_temperature: of their votes.
        knn_bank: labelled photos among which neighbours are looked for, at most.
        knn_queries: photos kept out of training, to be classified; a fifth at most.
        validate_every: steps between such tests; None is a pass over the photos.
        seed: of all random numbers.

    Raises:
        ValueError: a number or name outside these.

    Example:
        >>> DinoSettings(**PRESETS["entmax15"]).attention
        'entmax15'

    Source: DINO, arXiv 2104.14294, and its public code.
    """

    model: str = "dino_vit_small_patch16"
    attention: str | float = "softmax"
    registers: int = 0
    specialization: str | int = "none"
    drop_path: float = 0.1
    crops: Crops = field(default_factory=Crops)
    epochs: int = 100
    steps: int | None = None
    batch_size: int = 512
    accumulate: int = 1
    lr: float = 5e-4
    min_lr: float = 1e-6
    warmup_epochs: float = 10.0
    weight_decay: float = 0.04
    weight_decay_end: float = 0.4
    clip: float = 3.0
    freeze_last_layer: float = 1.0
    teacher_momentum: float = 0.996
    student_temperature: float = 0.1
    teacher_temperature: float = 0.04
    warmup_teacher_temperature: float = 0.04
    warmup_teacher_epochs: float = 0.0
    center_momentum: float = 0.9
    out_dim: int = 65536
    hidden_dim: int = 2048
    bottleneck_dim: int = 256
    norm_last_layer: bool = True
    precision: str = "auto"
    knn: str = "auto"
    knn_k: int = 20
    knn_temperature: float = 0.07
    knn_bank: int = 5000
    knn_queries: int = 1000
    validate_every: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.model.startswith(PREFIX):
            raise ValueError(f"expected a model {PREFIX}_{{tiny,small,base}}_patch{{8,16}}, got {self.model!r}")
        for name, names in {"precision": PRECISIONS, "knn": KNN}.items():
            if getattr(self, name) not in names:
                raise ValueError(f"expected {name} to be one of {', '.join(names)}, got {getattr(self, name)!r}")
        counts = "epochs steps batch_size accumulate out_dim hidden_dim bottleneck_dim knn_k knn_bank knn_queries"
        for name in [*counts.split(), "validate_every"]:
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"expected {name} of at least 1, got {getattr(self, name)}")
        for name in (
            "lr",
            "student_temperature",
            "teacher_temperature",
            "warmup_teacher_temperature",
            "knn_temperature",
        ):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"expected {name} above 0, got {getattr(self, name)}")
        if self.knn_temperature < LEAST_TEMPERATURE:
            raise ValueError(
                f"expected knn_temperature of {LEAST_TEMPERATURE} or more, got {self.knn_temperature}: votes are "
                "exp(cos / temperature), which must stay finite"
            )
        for name in ("min_lr", "weight_decay", "weight_decay_end", "clip"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"expected {name} of 0 or more, got {getattr(self, name)}")
        for name in ("teacher_momentum", "center_momentum"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"expected {name} of 0 to 1, got {getattr(self, name)}")
        for name in ("warmup_epochs", "freeze_last_layer", "warmup_teacher_epochs"):
            if not 0 <= getattr(self, name) <= self.epochs:
                raise ValueError(f"expected {name} of 0 to {self.epochs} epochs, got {getattr(self, name)}")

    def record(self) -> dict[str, Any]:
        """The settings as JSON can hold them."""
        return asdict(self)
