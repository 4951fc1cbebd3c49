"""Kullback-Leibler divergence between the predictions of a classifier on two images."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_recon.errors import MissingDataError, ShapeError
from lit_recon.measures import MEASURES
from lit_recon.metrics.registry import Metric, Unavailable, check_pairs, register

_CHUNK = 256  # images that pass through the classifier at a time
_NO_CLASSIFIER = Unavailable("no classifier was given")


def prediction_divergence(images: Tensor, targets: Tensor, classifier: nn.Module) -> Tensor:
    """Kullback-Leibler divergence of a classifier's predictions on images from those on their targets.

    `(n,)` float64, in nats: the sum over classes of `p log(p / q)` with `p` of the target and `q` of the image. Images
    and targets are pairs `(n, c, h, w)` in [0, 1]; the classifier, in evaluation mode, gives finite logits `(n, k)`. A
    ShapeError says that one of them does not fit.

    Source: [Balle2022], section V-B; the direction, which is not printed, is that of a loss.

    >>> images = torch.rand(3, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    >>> prediction_divergence(images, images, nn.Flatten()).tolist()
    [0.0, 0.0, 0.0]
    """
    check_pairs(images, targets)
    of_images, of_targets = _log_probabilities(images, classifier), _log_probabilities(targets, classifier)
    return F.kl_div(of_images, of_targets, reduction="none", log_target=True).sum(dim=1).clamp(min=0)


@register
class PredictionDivergence(Metric):
    """See `prediction_divergence`; the classifier may be the reason why there is none."""

    measure = MEASURES["kl"]

    def __init__(self, classifier: nn.Module | Unavailable = _NO_CLASSIFIER) -> None:
        self.classifier = classifier

    def unavailable(self) -> str:
        return self.classifier.reason if isinstance(self.classifier, Unavailable) else ""

    def __call__(self, found: Tensor, truth: Tensor) -> Tensor:
        if isinstance(self.classifier, Unavailable):
            raise MissingDataError(self.classifier.reason)
        return prediction_divergence(found, truth, self.classifier)


@torch.no_grad()
def _log_probabilities(images: Tensor, classifier: nn.Module) -> Tensor:
    logits = torch.cat([classifier(chunk.float()) for chunk in images.split(_CHUNK)]).double()
    if logits.dim() != 2 or not torch.isfinite(logits).all():
        raise ShapeError(f"a classifier must give finite logits (n, k); got {tuple(logits.shape)}")
    return logits.log_softmax(dim=1)
