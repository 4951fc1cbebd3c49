"""The strong classifier that says whether a reconstruction shows what its target shows."""

from __future__ import annotations

from pathlib import Path

from lit_recon.data import ImageSet
from lit_recon.errors import ShapeError
from lit_recon.metrics import Unavailable
from lit_recon.models import Backbone, load_backbone


def classifier_of(checkpoint: Path | None, images: ImageSet) -> Backbone | Unavailable:
    """The classifier in a file of `train.py backbone`, or why there is none.

    It may have been trained on the targets: it scores, and no attack sees it.

    Raises:
        MissingDataError, CorruptFileError: there is no such file, or it cannot be read.
        ShapeError: it is for other images or classes.
    """
    if checkpoint is None:
        return Unavailable("no classifier was given: train one by train.py backbone and give its file by classifier")
    model = load_backbone(checkpoint).model
    if model.image_shape != images.image_shape or model.n_classes != images.n_classes:
        raise ShapeError(
            f"classifier {checkpoint} takes images {model.image_shape} of {model.n_classes} classes; {images.name} has "
            f"{images.image_shape} of {images.n_classes}: give one that was trained on such data"
        )
    return model
