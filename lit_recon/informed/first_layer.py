"""What an image itself left in a first linear layer, told apart from how it changed the work of all other images.

Gradient descent adds multiples of training images to the rows of a first linear layer, and nothing else. The part of a
difference that is orthogonal to the fixed set therefore stems from the unknown image alone: it has rank one, and its
left factor says with which weight that image entered every neuron. Neurons added up with these weights show the image
far better than any neuron does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lit_recon.errors import ConfigError, ShapeError, ThreatModelError, UnsupportedModelError
from lit_recon.informed.kernel_ridge import KernelRidge, unit_length
from lit_recon.informed.reconstructor import (
    Background,
    FittedReconstructor,
    ReconstructedTargets,
    Reconstructor,
    check_shadows,
)
from lit_recon.informed.shadow.plan import ShadowPlan
from lit_recon.models.released import ReleasedMLP

#: Eigenvalues of the fixed set's Gram matrix below this share of the largest are 0 up to rounding.
_NULL = 1e-12
#: Least share of the orthogonal part's energy that its first singular value must have in half of all shadow models.
_RANK_ONE = 0.99
#: To choose from: traces vary more smoothly with the image than whole differences do, and are free of noise.
_BANDWIDTHS, _RIDGES = (1.0, 2.0, 4.0), (1e-9, 1e-8, 1e-7, 1e-6, 1e-5)


class Trace(NamedTuple):
    """What images left in a first layer; the sign of each row's three parts is arbitrary, and common to them.

    Attributes:
        image: `(m, d)`, the unknown image times a number, plus what fixed images were made to add.
        neurons: `(m, j)` of unit length: the weights of the unknown image in every neuron, up to a factor.
        outside: `(m, d)`, the part of the image that is orthogonal to the fixed set, times a number.
        share: `(m,)`, of the energy outside the fixed set's span that this rank-one part has; 1 but for rounding.
    """

    image: Tensor
    neurons: Tensor
    outside: Tensor
    share: Tensor

    def features(self, sign: Tensor, emphasis: float) -> Tensor:
        """Rows of unit length, float32: image and neurons, each of unit length, the latter times `emphasis`."""
        both = torch.cat([unit_length(self.image), emphasis * self.neurons.float()], dim=1)
        return unit_length(sign[:, None] * both)


@dataclass(frozen=True, eq=False)
class FirstLayer:
    """The first layer of models that were trained on a fixed set and one more image.

    Attributes:
        outside: `(d, q)` float64, an orthonormal basis of what is orthogonal to all images of the fixed set.
        neurons: of the layer, `j`.

    Source: ours; that gradients of a linear layer are combinations of its inputs is used by all attacks on them.
    """

    outside: Tensor
    neurons: int

    @classmethod
    def of(cls, plan: ShadowPlan) -> FirstLayer:
        """Of the models of a plan.

        Raises:
            UnsupportedModelError: the network does not begin with a linear layer.
            ConfigError: its rows are no combinations of training images, or the fixed set spans all images.
        """
        network, descent = plan.network, plan.descent
        if not isinstance(network, ReleasedMLP):
            raise UnsupportedModelError(
                "FirstLayerRidge needs a network whose first layer is linear, ReleasedMLP; got "
                f"{type(network).__name__}: use KernelRidge"
            )
        if descent.optimizer != "sgd" or descent.is_noisy or plan.initialization != "known" or descent.snapshots:
            raise ConfigError(
                "FirstLayerRidge needs the final models of gradient descent with known initial weights and without "
                f"noise; got {plan.initialization} weights, {descent.optimizer}, "
                f"{'noise' if descent.is_noisy else 'no noise'} and {len(descent.snapshots)} snapshots: use KernelRidge"
            )
        images = plan.fixed.pixels().flatten(1).double()
        values, vectors = torch.linalg.eigh(images.T @ images)
        null = values <= _NULL * values[-1]
        if not null.any():
            raise ConfigError(
                f"FirstLayerRidge needs fewer independent images in the fixed set than pixels; got {len(images)} "
                f"images that span all {len(values)} pixels: lower split.fixed, or use KernelRidge"
            )
        return cls(vectors[:, null], network.linear_layers[0].out_features)

    def trace(self, differences: Tensor) -> Trace:
        """What the unknown images left.

        Args:
            differences: of whole models, `(m, p)`.

        Raises:
            ShapeError: they are too short, or of no effect.
        """
        d = len(self.outside)
        if differences.dim() != 2 or differences.shape[1] < self.neurons * d:
            raise ShapeError(
                f"differences must be those of whole models (m, p) with a first layer of {self.neurons} x {d}; "
                f"got {tuple(differences.shape)}"
            )
        rows = differences[:, : self.neurons * d].unflatten(1, (self.neurons, d)).double()
        beyond = rows @ self.outside
        energies, vectors = torch.linalg.eigh(beyond @ beyond.mT)
        neurons = vectors[:, :, -1]
        return Trace(
            image=torch.einsum("mj,mjd->md", neurons, rows),
            neurons=neurons,
            outside=torch.einsum("mj,mjq->mq", neurons, beyond) @ self.outside.T,
            share=energies[:, -1] / energies.sum(dim=1).clamp(min=torch.finfo(torch.float64).tiny),
        )


@dataclass(frozen=True)
class FirstLayerRidge(Reconstructor):
    """Another reconstructor, fed with what the image itself left in the first layer.

    The sign of that trace is known for shadow models; for released models both are tried, and the one stays that the
    shadow models tell more about.

    Args:
        inner: learns from the traces; default: kernel ridge regression with wide kernels and small ridges.
        emphasis: of the neurons' weights beside the trace of the image.

    Source: ours.
    """

    inner: Reconstructor | None = None
    emphasis: float = 2.0

    def __post_init__(self) -> None:
        if not self.emphasis > 0:
            raise ConfigError(f"emphasis must be above 0; got {self.emphasis}")

    def informed(self, background: Background) -> Reconstructor:
        if background.plan is None:
            raise ThreatModelError(
                "FirstLayerRidge needs an adversary who sees the whole model and knows its fixed set: use KernelRidge"
            )
        inner = self.inner or KernelRidge(_BANDWIDTHS, _RIDGES)
        return _InformedFirstLayer(self, inner.informed(background), FirstLayer.of(background.plan))

    def fit(self, differences: Tensor, images: Tensor, labels: Tensor, n_classes: int) -> FittedReconstructor:
        raise ThreatModelError("FirstLayerRidge needs the fixed set: call informed() before fit()")


@dataclass(frozen=True, eq=False)
class _InformedFirstLayer(Reconstructor):
    settings: FirstLayerRidge
    inner: Reconstructor
    layer: FirstLayer

    def fit(self, differences: Tensor, images: Tensor, labels: Tensor, n_classes: int) -> FittedReconstructor:
        check_shadows(differences, images, labels, n_classes)
        trace = self.layer.trace(differences)
        share = float(trace.share.median())
        if share < _RANK_ONE:
            raise ConfigError(
                f"what the shadow models hold outside the span of the fixed set has rank one for {share:.1%} only: "
                "they were not trained by gradient descent on these images; use KernelRidge"
            )
        sign = torch.where((trace.outside * images.flatten(1)).sum(dim=1) < 0, -1.0, 1.0)
        fitted = self.inner.fit(trace.features(sign, self.settings.emphasis), images, labels, n_classes)
        return _FittedFirstLayer(fitted, self.layer, self.settings.emphasis, share)


@dataclass(frozen=True, eq=False)
class _FittedFirstLayer(FittedReconstructor):
    inner: FittedReconstructor
    layer: FirstLayer
    emphasis: float
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
        plus = self.inner.reconstruct(trace.features(one, self.emphasis))
        minus = self.inner.reconstruct(trace.features(-one, self.emphasis))
        better = plus.uncertainty <= minus.uncertainty
        return ReconstructedTargets(
            images=torch.where(better[:, None, None, None], plus.images, minus.images),
            labels=torch.where(better, plus.labels, minus.labels),
            uncertainty=torch.where(better, plus.uncertainty, minus.uncertainty),
        )
