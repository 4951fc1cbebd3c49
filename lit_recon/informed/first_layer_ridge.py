"""The missing image as a smooth function of what it left in the first layer, fitted in closed form."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lit_recon.errors import ConfigError, ThreatModelError
from lit_recon.informed.first_layer import FirstLayer, Trace
from lit_recon.informed.kernel_ridge import KernelRidge
from lit_recon.informed.reconstructor import (
    Background,
    FittedReconstructor,
    ReconstructedTargets,
    Reconstructor,
    check_shadows,
)

#: Least share of the whitened layer's energy that its rank-one part must have in half of all shadow models; that of
#: noise is 0.2, that of models trained on MNIST 0.95, on digits of 8 x 8 pixels 0.75.
_RANK_ONE = 0.5
#: To choose from: traces vary more smoothly with the image than whole differences do. Few models of large images need
#: the large ridges, many of small ones the others.
_BANDWIDTHS, _RIDGES = (2.0, 4.0, 8.0), (1e-7, 1e-5, 1e-3, 1e-2, 1e-1)

#: Shadow models whose traces are computed at a time, in float64.
_CHUNK = 2_000


@dataclass(frozen=True)
class FirstLayerRidge(Reconstructor):
    """Another reconstructor, fed with what the image itself left in the first layer and how the rest changed.

    The sign of that trace is known for shadow models; for released models both are tried, and the one stays that the
    shadow models tell more about.

    Args:
        inner: learns from the traces; default: kernel ridge regression with wide kernels and small ridges.
        remainder: weight of what the first layer holds besides the image, where image, neurons and all other weights,
            each of unit length, have 1.

    Source: ours.
    """

    inner: Reconstructor | None = None
    remainder: float = 0.7

    def __post_init__(self) -> None:
        if not self.remainder >= 0:
            raise ConfigError(f"remainder must be 0 or more; got {self.remainder}")

    def informed(self, background: Background) -> Reconstructor:
        layer = FirstLayer.of(background.plan, "FirstLayerRidge")
        inner = self.inner or KernelRidge(_BANDWIDTHS, _RIDGES)
        return _InformedFirstLayer(self, inner.informed(background), layer)

    def fit(self, differences: Tensor, images: Tensor, labels: Tensor, n_classes: int) -> FittedReconstructor:
        raise ThreatModelError("FirstLayerRidge needs the fixed set: call informed() before fit()")

    def features(self, trace: Trace, sign: Tensor) -> Tensor:
        """Rows `(m, f)` float32 of the parts of a trace, for one sign per model."""
        signed = torch.cat([_unit(trace.image), trace.neurons.float()], dim=1) * sign[:, None]
        return torch.cat([signed, _unit(trace.others), self.remainder * _unit(trace.remainder)], dim=1)


@dataclass(frozen=True, eq=False)
class _InformedFirstLayer(Reconstructor):
    settings: FirstLayerRidge
    inner: Reconstructor
    layer: FirstLayer

    def fit(self, differences: Tensor, images: Tensor, labels: Tensor, n_classes: int) -> FittedReconstructor:
        check_shadows(differences, images, labels, n_classes)
        features, shares = [], []
        for chunk in torch.arange(len(differences)).split(_CHUNK):
            trace = self.layer.trace(differences[chunk])
            own = self.layer.whiten(images[chunk].flatten(1))
            sign = torch.where((trace.whitened * own).sum(dim=1) < 0, -1.0, 1.0)
            features.append(self.settings.features(trace, sign))
            shares.append(trace.share)
        share = float(torch.cat(shares).median())
        if share < _RANK_ONE:
            raise ConfigError(
                "an image of its own leaves a part of rank one in the first layer; in the shadow models, less what the "
                f"fixed set explains, that part has {share:.1%} in the median: they were not trained by gradient "
                "descent on these images, or went too far from the reference; use KernelRidge"
            )
        fitted = self.inner.fit(torch.cat(features), images, labels, n_classes)
        return _FittedFirstLayer(fitted, self.settings, self.layer, share)


@dataclass(frozen=True, eq=False)
class _FittedFirstLayer(FittedReconstructor):
    inner: FittedReconstructor
    settings: FirstLayerRidge
    layer: FirstLayer
    share: float

    @property
    def facts(self) -> dict[str, float]:
        """Those of the inner one, and the median `rank_one_share` of shadow models."""
        return {**self.inner.facts, "rank_one_share": self.share}

    @property
    def notes(self) -> tuple[str, ...]:
        """Those of the inner one."""
        return self.inner.notes

    def reconstruct(self, differences: Tensor) -> ReconstructedTargets:
        trace, one = self.layer.trace(differences), torch.ones(len(differences))
        plus = self.inner.reconstruct(self.settings.features(trace, one))
        minus = self.inner.reconstruct(self.settings.features(trace, -one))
        better = plus.uncertainty <= minus.uncertainty
        return ReconstructedTargets(
            images=torch.where(better[:, None, None, None], plus.images, minus.images),
            labels=torch.where(better, plus.labels, minus.labels),
            uncertainty=torch.where(better, plus.uncertainty, minus.uncertainty),
        )


def _unit(rows: Tensor) -> Tensor:
    """Rows divided by their lengths, float32; zero stays zero."""
    directions: Tensor = rows / rows.norm(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    return directions.float()
