"""A backbone as a released model."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from lit_recon.attacks.trainset.base import ReleasedModel
from lit_recon.models import load_backbone
from lit_recon.training.module import read_utility


def released_from_backbone(path: str | Path, n_examples: int, weight_decay: float | None = None) -> ReleasedModel:
    """The backbone in a file of `train.py backbone`, in float64, of which all but its training images is public.

    The mean image is that of the normalization; the loss is that in the training's run folder, None elsewhere.

    Args:
        path: of the `backbone.safetensors`.
        n_examples: number of images that it was trained on.
        weight_decay: of the training; None: unknown.

    Raises:
        MissingDataError: no file at `path`.
        CorruptFileError: the file or the record of its training is damaged.
    """
    path = Path(path)
    model = load_backbone(path).model.double()
    loss = read_utility(path.parent)["final_train_loss"]
    mean: Tensor = model.pixel_mean.expand(model.image_shape).clone()
    return ReleasedModel(
        model=model,
        weights={name: weight.detach() for name, weight in model.named_parameters()},
        task="multiclass",
        image_shape=model.image_shape,
        n_classes=model.n_classes,
        mean=mean,
        n_examples=n_examples,
        weight_decay=weight_decay,
        loss=loss if isinstance(loss, float) else None,
    )
