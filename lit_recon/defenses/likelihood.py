"""The density of an observed update, given the update before the noise."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lit_recon.errors import ConfigError
from lit_recon.records import Noise, NoiseFamily, Update

#: Mean of -log density at the truth, at scale 1: 1/2 + log(2 pi)/2 for the normal, 1 + log 2 for the Laplace.
_ENTROPY = {"gaussian": 0.5 + 0.5 * math.log(2 * math.pi), "laplace": 1 + math.log(2)}


def log_likelihood(
    candidate: Update, observed: Update, noise: Noise | None, family: NoiseFamily = "gaussian"
) -> Tensor:
    """Log-density, a float64 scalar, of the observed update's coordinates other than zero, around `candidate`.

    Differentiable in the candidate, and works under `torch.func.vmap`. Coordinates observed as exactly zero were
    dropped; noise has none of them.

    Args:
        candidate: the update before the noise, as the defense's `simulate` computes it.
        observed: as released.
        noise: of the release, see `Defense.released_noise`; None: the scale is unknown, and the one that maximizes the
            density is taken (profile likelihood).
        family: of noise of unknown scale.

    >>> zero, seen = {"w": torch.zeros(2)}, {"w": torch.tensor([1.0, -1.0])}
    >>> round(float(log_likelihood(zero, seen, Noise("laplace", 1.0))), 6)  # 2 (-log 2 - 1)
    -3.386294
    """
    if noise is not None and not noise.scale > 0:
        raise ConfigError(f"a likelihood needs noise of a scale above 0; got {noise.scale:g}")
    name = family if noise is None else noise.family
    if name not in _ENTROPY:
        raise ConfigError(f"a likelihood needs noise of the family 'gaussian' or 'laplace'; got {name!r}")
    count, total = _misfit(candidate, observed, squared=name == "gaussian")
    power = 0.5 if name == "gaussian" else 1.0
    if noise is None:  # mean square or mean absolute value: its power-th power is the scale
        mean = (total / count.clamp_min(1)).clamp_min(torch.finfo(torch.float64).tiny)
        return -count * (_ENTROPY[name] + power * mean.log())
    unit = noise.scale**2 if name == "gaussian" else noise.scale
    excess = total / unit - count
    return -count * (_ENTROPY[name] + math.log(noise.scale)) - power * excess


def expected_log_likelihood(observed: Update, noise: Noise) -> Tensor:
    """Mean of `log_likelihood` of the true update, a float64 scalar: minus the entropy of the noise."""
    return -_observed(observed) * (_ENTROPY[noise.family] + math.log(noise.scale))


def _observed(observed: Update) -> Tensor:
    return torch.stack([(value != 0).sum() for value in observed.values()]).sum().double()


def _misfit(candidate: Update, observed: Update, squared: bool) -> tuple[Tensor, Tensor]:
    """Number of observed coordinates, and the sum of squared or absolute residuals there."""
    parts = []
    for name, value in observed.items():
        residual = torch.where(value != 0, candidate[name] - value, 0.0)
        parts.append((residual.square() if squared else residual.abs()).sum().double())
    return _observed(observed), torch.stack(parts).sum()
