"""Reconstruction from the first linear layer, by a regression on its rank-one part.

Gradient descent adds multiples of training images to the rows of a first linear layer. A difference is therefore the
sum of two parts: the unknown image times its coefficient in every neuron, which has rank one, and the fixed images
times the change of their coefficients. The second part lies mainly in the directions in which the fixed set varies
most. Whitening by the fixed set's covariance suppresses it; the leading left singular vector of what remains estimates
the coefficients of the unknown image, and the neurons, combined by these, show the image. Behind convolutions the
layer's inputs take the place of images, as they are at the end of the reference's training.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lit_recon.attacks.released.base import Background, Improvement, ReconstructedTargets, Reconstructor
from lit_recon.attacks.released.kernel_ridge import KernelRidge
from lit_recon.attacks.released.kernel_systems import BlockSolver
from lit_recon.attacks.shadow.plan import ShadowPlan
from lit_recon.attacks.shadow.training import unflatten
from lit_recon.errors import ConfigError, ShapeError, ThreatModelError, UnsupportedModelError
from lit_recon.models.released import ReleasedCNN, ReleasedMLP

#: Added to the fixed set's mean square in every direction, as a share of the mean over directions. Directions without
#: variance in the fixed set, where only the unknown image contributes, then weigh ten times the average.
_FLOOR = 1e-2
#: Images or shadow models at a time, the latter in float64.
_CHUNK = 2_000
#: Avoids a division by zero.
TINY = torch.finfo(torch.float64).tiny


class Trace(NamedTuple):
    """Rank-one decomposition of differences of a first layer; both factors share an arbitrary sign."""

    image: Tensor  # `(m, d)`, a multiple of the unknown image or its input, plus an error from the fixed images
    neurons: Tensor  # `(m, j)` of unit length: the unknown image's coefficient in every neuron, up to a factor
    whitened: Tensor  # `(m, d)`, a multiple of the whitened input
    remainder: Tensor  # `(m, j * d)`, the layer minus the outer product of `neurons` and `image`
    others: Tensor  # `(m, p - j * d)`, differences of all other weights
    share: Tensor  # `(m,)`, the share of the whitened layer's squared norm that the rank-one part explains


@dataclass(frozen=True, eq=False)
class WhitenedFirstLayer:
    """The first layer of models that were trained on a fixed set and one more image."""

    directions: Tensor  # orthonormal `(d, r)` float64, in which the fixed set varies
    excess: Tensor  # `(r,)`, the inverse root of the fixed set's mean squares there, minus that of all other directions
    neurons: int  # number of neurons `j`
    before: nn.Module  # from images `(n, c, h, w)` to the layer's inputs, `(n, d)`
    start: int  # position of the layer's weights in those of a model

    @staticmethod
    def check(plan: ShadowPlan | None, who: str = "the attack", convolutions: bool = False) -> ShadowPlan:
        """The plan, if it has such a layer, behind `convolutions` only if they are allowed; ThreatModelError without.

        UnsupportedModelError or ConfigError where the rows of the layer are not combinations of its inputs.
        """
        if plan is None:
            raise ThreatModelError(
                f"{who} needs an adversary who sees the whole model and knows its fixed set: use KernelRidge"
            )
        network, descent = plan.network, plan.descent
        if not isinstance(network, ReleasedMLP) and not (convolutions and isinstance(network, ReleasedCNN)):
            wanted = "ReleasedMLP or ReleasedCNN" if convolutions else "ReleasedMLP"
            raise UnsupportedModelError(
                f"{who} needs a network whose first layer{' or first after convolutions' if convolutions else ''} is "
                f"linear, {wanted}; got {type(network).__name__}: use KernelRidge"
            )
        if descent.optimizer != "sgd" or descent.is_noisy or plan.initialization != "known" or descent.snapshots:
            raise ConfigError(
                f"{who} needs the final models of gradient descent with known initial weights and without noise; "
                f"got {plan.initialization} weights, {descent.optimizer}, "
                f"{'noise' if descent.is_noisy else 'no noise'} and {len(descent.snapshots)} snapshots: use KernelRidge"
            )
        return plan

    @classmethod
    def of(cls, plan: ShadowPlan | None, who: str = "the attack", convolutions: bool = False) -> WhitenedFirstLayer:
        """Of the models of a plan; raises as `check`. Behind convolutions the reference has to be trained."""
        plan = cls.check(plan, who, convolutions)
        network = plan.network
        layers = copy.deepcopy(network.layers)
        if isinstance(network, ReleasedCNN):
            layers.load_state_dict(unflatten(layers, plan.reference().float()))
        first, layer = next((n, layer) for n, layer in enumerate(layers) if isinstance(layer, nn.Linear))
        before = layers[:first].requires_grad_(False)
        start = sum(parameter.numel() for parameter in before.parameters())
        inputs = torch.cat([before(some) for some in plan.fixed.pixels().split(_CHUNK)]).double()
        n, d = inputs.shape
        if n < d:
            directions = torch.linalg.svd(inputs, full_matrices=False).Vh.T
        else:
            directions = torch.linalg.eigh(inputs.T @ inputs).eigenvectors
        squares = (inputs @ directions).square().mean(dim=0)
        excess = (squares * d / squares.sum() + _FLOOR).rsqrt() - _FLOOR**-0.5
        return cls(directions, excess, layer.out_features, before, start)

    def whiten(self, rows: Tensor) -> Tensor:
        """Rows `(..., d)` divided by the fixed set's root mean square in every direction, up to a factor, float64."""
        rows = rows.double()
        whitened: Tensor = rows * _FLOOR**-0.5 + ((rows @ self.directions) * self.excess) @ self.directions.T
        return whitened

    def rows(self, differences: Tensor) -> Tensor:
        """The layer's weights `(m, j, d)` float64 of whole models `(m, p)`; ShapeError if these are too short."""
        d = len(self.directions)
        if differences.dim() != 2 or differences.shape[1] < self.start + self.neurons * d:
            raise ShapeError(
                f"differences must be those of whole models (m, p) with a first layer of {self.neurons} x {d}; "
                f"got {tuple(differences.shape)}"
            )
        own = slice(self.start, self.start + self.neurons * d)
        rows: Tensor = differences[:, own].unflatten(1, (self.neurons, d)).double()
        return rows

    def trace(self, differences: Tensor) -> Trace:
        """The rank-one decomposition for differences of whole models `(m, p)`; ShapeError if these are too short."""
        rows = self.rows(differences)
        others = torch.cat([differences[:, : self.start], differences[:, self.start + rows[0].numel() :]], dim=1)
        whitened = self.whiten(rows)
        energies, vectors = torch.linalg.eigh(whitened @ whitened.mT)
        neurons = vectors[:, :, -1]
        image = torch.einsum("mj,mjd->md", neurons, rows)
        return Trace(
            image=image,
            neurons=neurons,
            whitened=torch.einsum("mj,mjd->md", neurons, whitened),
            remainder=rows.sub_(neurons[:, :, None] * image[:, None, :]).flatten(1),
            others=others.double(),
            share=energies[:, -1] / energies.sum(dim=1).clamp(min=TINY),
        )

    def weights(self, rows: Tensor, images: Tensor) -> Tensor:
        """Coefficients `(m, j)` of known images `(m, d)` in every neuron of the layer's differences `(m, j, d)`."""
        whitened = self.whiten(images)
        own = torch.einsum("mjd,md->mj", rows, self.whiten(whitened))
        weights: Tensor = own / whitened.square().sum(dim=1, keepdim=True).clamp(min=TINY)
        return weights


#: Least median share of the rank-one part over all shadow models. Noise has 0.2, models trained on MNIST have 0.95, on
#: digits of 8 x 8 pixels 0.75.
_RANK_ONE = 0.5
#: Candidates for kernel ridge regression: the decomposition varies more smoothly with the image than whole differences
#: do. Large ridges suit few models of large images, small ones many models of small images.
_BANDWIDTHS, _RIDGES = (2.0, 4.0, 8.0), (1e-7, 1e-5, 1e-3, 1e-2, 1e-1)


@dataclass
class FirstLayerRidge(Improvement):
    """Another reconstructor on features of the first layer: its rank-one part and what remains.

    The sign of the rank-one factors is known for shadow models. For released models both signs are tried, and the
    reconstruction with the smaller uncertainty is returned.

    Args:
        inner: learns from the features; default: kernel ridge regression with wide kernels and small ridges.
        remainder: weight of the first layer's remainder; image, neurons and all other weights have weight 1.
        solver: of the default's system, and the bound on its memory, beside features of the size of whole models.
    """

    inner: Reconstructor | None = None
    remainder: float = 0.7
    solver: BlockSolver = field(default_factory=BlockSolver)

    def __post_init__(self) -> None:
        if not self.remainder >= 0:
            raise ConfigError(f"remainder must be 0 or more; got {self.remainder}")
        if self.inner is not None and self.solver != BlockSolver():
            raise ConfigError("solver is that of the default for inner; got both: set the solver of inner instead")

    def prepare(self, background: Background) -> None:
        self.plan = WhitenedFirstLayer.check(background.plan, "FirstLayerRidge", convolutions=True)
        usual = KernelRidge(_BANDWIDTHS, _RIDGES, solver=self.solver)
        self.guess = (self.inner or usual).bind(background)

    def fit(self, differences: Tensor, images: Tensor, labels: Tensor, n_classes: int) -> None:
        self.layer = WhitenedFirstLayer.of(self.plan, convolutions=True)  # may train, which `prepare` must not
        features, shares = torch.empty(0), []
        for chunk in torch.arange(len(differences)).split(_CHUNK):
            trace = self.layer.trace(differences[chunk])
            own = self.layer.whiten(self.layer.before(images[chunk]))
            sign = torch.where((trace.whitened * own).sum(dim=1) < 0, -1.0, 1.0)
            part = self.features(trace, sign)
            if not len(features):  # one array for all, since joining parts would hold them twice
                features = part.new_empty(len(differences), part.shape[1])
            features[chunk] = part
            shares.append(trace.share)
        self.share = float(torch.cat(shares).median())
        if self.share < _RANK_ONE:
            raise ConfigError(
                "the first layer of a model must differ from the reference mainly by a part of rank one, that of its "
                f"own image; in the shadow models this part has a median share of {self.share:.1%}: they were not "
                "trained by gradient descent on these images, or are too far from the reference; use KernelRidge"
            )
        super().fit(features, images, labels, n_classes)

    def features(self, trace: Trace, sign: Tensor) -> Tensor:
        """Features `(m, f)` float32 of a decomposition, given a sign for every model."""
        signed = torch.cat([_unit(trace.image), trace.neurons.float()], dim=1) * sign[:, None]
        return torch.cat([signed, _unit(trace.others), self.remainder * _unit(trace.remainder)], dim=1)

    @property
    def facts(self) -> dict[str, float]:
        """Those of `inner`, and the median share of the rank-one part, `rank_one_share`."""
        return {**super().facts, "rank_one_share": self.share}

    def reconstruct(self, differences: Tensor) -> ReconstructedTargets:
        trace, one = self.layer.trace(differences), torch.ones(len(differences))
        plus, minus = (self.guess.reconstruct(self.features(trace, sign)) for sign in (one, -one))
        better = plus.uncertainty <= minus.uncertainty
        return ReconstructedTargets(
            images=torch.where(better[:, None, None, None], plus.images, minus.images),
            labels=torch.where(better, plus.labels, minus.labels),
            uncertainty=torch.where(better, plus.uncertainty, minus.uncertainty),
        )


def _unit(rows: Tensor) -> Tensor:
    """Rows divided by their lengths, float32; zero stays zero."""
    directions: Tensor = rows / rows.norm(dim=1, keepdim=True).clamp(min=TINY)
    return directions.float()
