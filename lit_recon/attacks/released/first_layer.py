"""The missing image as a smooth function of what it left in the first layer, fitted in closed form.

Gradient descent adds multiples of training images to the rows of a first linear layer, and nothing else: a difference
is the unknown image times its weight in every neuron, which has rank one, plus fixed images times the change of theirs.
The latter change smoothly from image to image, so that their sum lies where the fixed set varies most. Divided by the
fixed set's own variation in every direction, a difference is all but the rank-one part, and its left factor says with
which weight the unknown image entered every neuron. Neurons added up with these weights show the image far better than
any neuron does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lit_recon.attacks.released.base import (
    Background,
    FittedReconstructor,
    ReconstructedTargets,
    Reconstructor,
    check_shadows,
)
from lit_recon.attacks.released.kernel_ridge import KernelRidge
from lit_recon.attacks.shadow.plan import ShadowPlan
from lit_recon.errors import ConfigError, ShapeError, ThreatModelError, UnsupportedModelError
from lit_recon.models.released import ReleasedMLP

#: Added to the fixed set's mean squares in every direction, as a share of their mean. Where the fixed set has nothing,
#: and the unknown image is all there is, a difference then counts ten times as much as on average.
_FLOOR = 1e-2


class Trace(NamedTuple):
    """What images left in a first layer; the sign of the rank-one part's factors is arbitrary, and common to them.

    Attributes:
        image: `(m, d)`, the unknown image times a number, plus what fixed images were made to add.
        neurons: `(m, j)` of unit length: the weights of the unknown image in every neuron, up to a factor.
        whitened: `(m, d)`, the rank-one part's right factor: the whitened image times a number.
        remainder: `(m, j * d)`, of the layer, less neurons times image.
        others: `(m, p - j * d)`, differences of all other weights.
        share: `(m,)`, of the whitened layer's energy that its rank-one part has.
    """

    image: Tensor
    neurons: Tensor
    whitened: Tensor
    remainder: Tensor
    others: Tensor
    share: Tensor


@dataclass(frozen=True, eq=False)
class WhitenedFirstLayer:
    """The first layer of models that were trained on a fixed set and one more image.

    Attributes:
        directions: orthonormal `(d, r)` float64, in which the fixed set varies.
        excess: `(r,)`, the inverse root of the fixed set's mean squares there, less that of all other directions.
        neurons: of the layer, `j`.

    Source: ours; that gradients of a linear layer are combinations of its inputs is used by all attacks on them.
    """

    directions: Tensor
    excess: Tensor
    neurons: int

    @classmethod
    def of(cls, plan: ShadowPlan | None, who: str = "the attack") -> WhitenedFirstLayer:
        """Of the models of a plan; `who` asks.

        Raises:
            ThreatModelError: there is no plan: the adversary does not see the whole model.
            UnsupportedModelError: the network does not begin with a linear layer.
            ConfigError: its rows are no combinations of training images.
        """
        if plan is None:
            raise ThreatModelError(
                f"{who} needs an adversary who sees the whole model and knows its fixed set: use KernelRidge"
            )
        network, descent = plan.network, plan.descent
        if not isinstance(network, ReleasedMLP):
            raise UnsupportedModelError(
                f"{who} needs a network whose first layer is linear, ReleasedMLP; got "
                f"{type(network).__name__}: use KernelRidge"
            )
        if descent.optimizer != "sgd" or descent.is_noisy or plan.initialization != "known" or descent.snapshots:
            raise ConfigError(
                f"{who} needs the final models of gradient descent with known initial weights and without noise; "
                f"got {plan.initialization} weights, {descent.optimizer}, "
                f"{'noise' if descent.is_noisy else 'no noise'} and {len(descent.snapshots)} snapshots: use KernelRidge"
            )
        images = plan.fixed.pixels().flatten(1).double()
        n, d = images.shape
        if n < d:
            directions = torch.linalg.svd(images, full_matrices=False).Vh.T
        else:
            directions = torch.linalg.eigh(images.T @ images).eigenvectors
        squares = (images @ directions).square().mean(dim=0)
        excess = (squares * d / squares.sum() + _FLOOR).rsqrt() - _FLOOR**-0.5
        return cls(directions, excess, network.linear_layers[0].out_features)

    def whiten(self, rows: Tensor) -> Tensor:
        """Rows `(..., d)` in units of the fixed set's variation in every direction, float64.

        The fixed set's mean square of an average direction is the unit; a hundredth is added to all.
        """
        rows = rows.double()
        whitened: Tensor = rows * _FLOOR**-0.5 + ((rows @ self.directions) * self.excess) @ self.directions.T
        return whitened

    def rows(self, differences: Tensor) -> Tensor:
        """The layer's weights `(m, j, d)` float64 of differences of whole models `(m, p)`.

        Raises:
            ShapeError: they are too short.
        """
        d = len(self.directions)
        if differences.dim() != 2 or differences.shape[1] < self.neurons * d:
            raise ShapeError(
                f"differences must be those of whole models (m, p) with a first layer of {self.neurons} x {d}; "
                f"got {tuple(differences.shape)}"
            )
        rows: Tensor = differences[:, : self.neurons * d].unflatten(1, (self.neurons, d)).double()
        return rows

    def trace(self, differences: Tensor) -> Trace:
        """What the unknown images left.

        Args:
            differences: of whole models, `(m, p)`.

        Raises:
            ShapeError: they are too short.
        """
        rows = self.rows(differences)
        whitened = self.whiten(rows)
        energies, vectors = torch.linalg.eigh(whitened @ whitened.mT)
        neurons = vectors[:, :, -1]
        image = torch.einsum("mj,mjd->md", neurons, rows)
        return Trace(
            image=image,
            neurons=neurons,
            whitened=torch.einsum("mj,mjd->md", neurons, whitened),
            remainder=rows.sub_(neurons[:, :, None] * image[:, None, :]).flatten(1),
            others=differences[:, rows[0].numel() :].double(),
            share=energies[:, -1] / energies.sum(dim=1).clamp(min=torch.finfo(torch.float64).tiny),
        )

    def weights(self, rows: Tensor, images: Tensor) -> Tensor:
        """With which weights images that are known entered every neuron, `(m, j)`.

        Args:
            rows: the layer's differences `(m, j, d)`.
            images: `(m, d)`.
        """
        whitened = self.whiten(images)
        own = torch.einsum("mjd,md->mj", rows, self.whiten(whitened))
        weights: Tensor = own / whitened.square().sum(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
        return weights


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

    def bind(self, background: Background) -> Reconstructor:
        layer = WhitenedFirstLayer.of(background.plan, "FirstLayerRidge")
        inner = self.inner or KernelRidge(_BANDWIDTHS, _RIDGES)
        return _InformedFirstLayer(self, inner.bind(background), layer)

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
    layer: WhitenedFirstLayer

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
    layer: WhitenedFirstLayer
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
