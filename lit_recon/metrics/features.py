"""Metrics of labels and features: recovered labels, spans and cosines of features, a classifier's predictions."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_recon.errors import MissingDataError, ShapeError
from lit_recon.measures import MEASURES
from lit_recon.metrics.registry import Metric, Unavailable, check_pairs, register

_CHUNK = 256  # images that pass through the classifier at a time
_NO_CLASSIFIER = Unavailable("no classifier was given")


def label_hits(recovered: Tensor, true: Tensor) -> Tensor:
    """Which true labels are among the recovered ones, as multisets: order does not count, multiplicity does.

    Both are integer classes `(n,)`, a ShapeError for others. Of a class recovered k times, its first k true labels get
    1, the others 0, `(n,)` float64; the mean is the label accuracy.

    >>> label_hits(torch.tensor([0, 1, 0, 5]), torch.tensor([0, 0, 1, 1])).tolist()
    [1.0, 1.0, 1.0, 0.0]
    """
    for name, labels in (("recovered", recovered), ("true", true)):
        if labels.dim() != 1 or labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
            raise ShapeError(
                f"{name} labels must be integer classes (n,); got {labels.dtype} of shape {tuple(labels.shape)}"
            )
    if len(recovered) != len(true):
        raise ShapeError(f"one label per image is needed; got {len(recovered)} recovered and {len(true)} true labels")
    found = (recovered == true[:, None]).sum(dim=1)
    earlier = (true == true[:, None]).tril(diagonal=-1).sum(dim=1)
    return (earlier < found).double()


def span_error(recovered: Tensor, features: Tensor) -> Tensor:
    """Norm `(n,)`, float64 in [0, 1], of each normalized true feature's part outside the span of the recovered ones.

    Args:
        recovered: rows `(r, d)`; their order, sign and norm do not count.
        features: true features `(n, d)`, not 0.

    Raises:
        ShapeError: not two matrices of equal width, no true feature, or entries that are not finite.

    Source: [Liu2025], section 5 (feature reconstruction error), table 2.

    >>> span_error(torch.tensor([[1.0, 0.0]]), torch.tensor([[3.0, 0.0], [1.0, 1.0]])).round(decimals=4).tolist()
    [0.0, 0.7071]
    """
    found, truth = _checked(recovered, features)
    _, values, rows = torch.linalg.svd(found, full_matrices=False)
    if len(values):
        rows = rows[values > torch.finfo(found.dtype).eps * max(found.shape) * values[0]]
    # not sqrt(1 - |projection|^2), which cannot tell 1e-8 from 0
    outside: Tensor = (truth - truth @ rows.T @ rows).norm(dim=1).clamp(max=1)
    return outside


def feature_cosines(recovered: Tensor, features: Tensor) -> Tensor:
    """`|cos|`, `(n,)` float64, of every true feature and the recovered one that an optimal assignment gives it.

    The assignment (Kuhn 1955) has the greatest total; features that get none, as fewer were recovered, have 0.
    Arguments and errors as for `span_error`.

    >>> feature_cosines(torch.tensor([[0.0, -2.0], [1.0, 0.0]]), torch.eye(2)).tolist()
    [1.0, 1.0]
    """
    from scipy.optimize import linear_sum_assignment

    found, truth = _checked(recovered, features)
    cosines = (truth @ torch.nn.functional.normalize(found, dim=1).T).abs().clamp(max=1)
    rows, columns = linear_sum_assignment(-cosines.numpy())
    matched = cosines.new_zeros(len(truth))
    matched[rows] = cosines[rows, columns]
    return matched


def _checked(recovered: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    """Both in float64 on the CPU, the true ones with unit norm."""
    if recovered.dim() != 2 or features.dim() != 2 or recovered.shape[1] != features.shape[1] or len(features) == 0:
        raise ShapeError(
            f"recovered and true features must be (r, d) and (n, d) with n >= 1; "
            f"got {tuple(recovered.shape)} and {tuple(features.shape)}"
        )
    found, truth = (values.detach().cpu().double() for values in (recovered, features))
    if not (found.isfinite().all() and truth.isfinite().all()):
        raise ShapeError("features must be finite; some are NaN or infinite")
    if (truth.norm(dim=1) == 0).any():
        raise ShapeError("a true feature is zero: it has no direction to be recovered")
    return found, torch.nn.functional.normalize(truth, dim=1)


@register
class LabelAccuracy(Metric):
    """Share of a batch's labels that were recovered; see `label_hits`."""

    measure = MEASURES["label_accuracy"]
    of = "labels"
    __call__ = staticmethod(label_hits)


@register
class FeatureError(Metric):
    """See `span_error`."""

    measure = MEASURES["feature_error"]
    of = "features"
    __call__ = staticmethod(span_error)


@register
class FeatureCosine(Metric):
    """See `feature_cosines`."""

    measure = MEASURES["feature_cosine"]
    of = "features"
    __call__ = staticmethod(feature_cosines)


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
