"""Van Trees: the Cramer-Rao bound for attackers with a prior, biased or not, on average over that prior.

If inputs are drawn from a density with information `P` about their location, any attack at all, whatever it knows of
that density, has `E |x^ - x|^2 >= tr((E F + P)^-1)`, the mean being over inputs and noise. There is no better worst
case: with no noise the bound is 0, with no information it is the prior's own spread. It holds for the prior that it
names; for real images a Gaussian prior of their mean and covariance is a model, and the bound is as good as that.

Sources:
    [VanTrees1968] Van Trees, Detection, estimation and modulation theory, part I, section 2.4.
    [GillLevit1995] Gill and Levit, Applications of the van Trees inequality.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lit_recon.bounds.cramer_rao import ErrorBound
from lit_recon.errors import ConfigError, ShapeError

EVERY_ATTACK = "every attack, biased or not, on average over inputs drawn from the prior"


@dataclass(frozen=True)
class GaussianPrior:
    """Inputs that are drawn independently from one normal distribution.

    Attributes:
        covariance: of one input, `(d, d)`, positive definite.

    >>> GaussianPrior.isotropic(3, variance=0.5).precision(n=2).diagonal().tolist()
    [2.0, 2.0, 2.0, 2.0, 2.0, 2.0]
    """

    covariance: Tensor

    def __post_init__(self) -> None:
        if self.covariance.dim() != 2 or self.covariance.shape[0] != self.covariance.shape[1]:
            raise ShapeError(f"a covariance is a square matrix; got {tuple(self.covariance.shape)}")
        if not torch.linalg.eigvalsh(self.covariance)[0] > 0:
            raise ConfigError("a Gaussian prior needs a positive definite covariance: raise its floor")

    @classmethod
    def isotropic(cls, d: int, variance: float) -> GaussianPrior:
        """Of one variance in all directions."""
        if not variance > 0:
            raise ConfigError(f"a Gaussian prior needs a variance above 0; got {variance:g}")
        return cls(variance * torch.eye(d, dtype=torch.float64))

    @classmethod
    def fitted(cls, samples: Tensor, floor: float = 1e-4) -> GaussianPrior:
        """Of the covariance of samples `(n, ...)`, with `floor` added to every variance.

        The floor keeps pixels that never change, and directions beyond the number of samples, from counting as known;
        it makes the bound a little larger than that of the samples' own covariance.

        Raises:
            ShapeError: fewer than two samples.
            ConfigError: a floor that is not above 0.
        """
        if len(samples) < 2 or not floor > 0:
            raise (ShapeError if len(samples) < 2 else ConfigError)(
                f"a prior is fitted to 2 samples or more with a floor above 0; got {len(samples)} and {floor:g}"
            )
        covariance = torch.cov(samples.flatten(1).double().T).reshape(samples[0].numel(), -1)
        return cls(covariance + floor * torch.eye(len(covariance), dtype=torch.float64))

    def precision(self, n: int) -> Tensor:
        """Information of the prior about a batch of `n` inputs, `(n d, n d)`."""
        inverse: Tensor = torch.linalg.inv(self.covariance)
        blocks: Tensor = torch.block_diag(*[inverse] * n)
        return blocks


def van_trees(information: Tensor, prior: GaussianPrior) -> ErrorBound:
    """`tr((F + P)^-1)`, and `q^2 / tr(F + P)`, which is never above it.

    Args:
        information: `(q, q)`, its mean over draws of the inputs from the prior, example after example.
        prior: of one input.

    Raises:
        ShapeError: the information does not belong to whole inputs.

    Source: [VanTrees1968]; [GillLevit1995], equation 1.

    >>> bound = van_trees(torch.zeros(4, 4), GaussianPrior.isotropic(2, variance=0.25))
    >>> bound.squared, bound.mse
    (1.0, 0.25)
    """
    size, d = len(information), len(prior.covariance)
    if information.shape != (size, size) or size % d or not information.isfinite().all():
        raise ShapeError(
            f"a prior on inputs of {d} coordinates needs an information (n {d}, n {d}); got {tuple(information.shape)}"
        )
    total = information.double() + prior.precision(size // d).to(information.device)
    squared = float(torch.linalg.inv(total).diagonal().sum())
    return ErrorBound(squared, size**2 / float(total.diagonal().sum()), size, EVERY_ATTACK)
