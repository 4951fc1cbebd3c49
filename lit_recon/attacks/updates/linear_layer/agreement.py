"""Whether the update that a found image gives agrees with the observed one, where defenses leave them comparable."""

from __future__ import annotations

from typing import NamedTuple

import torch
from scipy.stats import t as student
from torch import Tensor
from torch.nn.functional import cosine_similarity

from lit_recon.attacks.updates.labels.head import exact
from lit_recon.records import Update

#: Share of draws of the noise in which tensors of one factor seem to have different ones.
_DOUBT = 1e-3
#: Noise of derivatives up to which it counts as rounding, and the largest sine of the angle between them and the
#: candidate's that rounding may cause.
_CLEAN, _TURNED = 1e-3, 2e-3


class _Factor(NamedTuple):
    """What multiplies a simulated tensor in the observed update: between `low` and `high`; sine of their angle."""

    name: str
    low: float
    high: float
    turned: float


def distorted(derivatives: Tensor, weight: Tensor, largest: float) -> bool:
    """Whether entries seem to be cut off, the largest of several rows, or hidden, in a way that a fit does not show.

    An input whose column of weights is zero may have been 0, or anything, with an error of about 1: so many may be zero
    that the root mean square error is at most `largest`.
    """
    cut = any(int((size == size.max()).any(dim=1).sum()) > 1 for size in (weight.abs(), derivatives.T.abs()))
    return cut or float((weight == 0).all(dim=0).double().mean()) > largest**2


def unexplained(candidate: Update, observed: Update) -> float:
    """Sine of the angle between the candidate's update and the observed one: clipping does not change it."""
    one, two = (torch.cat([exact(update[name]).flatten() for name in observed]) for update in (candidate, observed))
    return float((1 - cosine_similarity(one, two, dim=0).square()).clamp(min=0).sqrt())


def disagreement(candidate: Update, observed: Update, derivatives: str, allowed: float, noise: float) -> str:
    """Why the update is not the candidate's times one factor, as after clipping, and noise; empty if it is.

    The ratio of the gradients of a weight and a bias gives the size of an image. It is wrong where every tensor was
    clipped by itself or has a rate of its own. Then the factors of other tensors differ, or, where biases have a rate
    of their own, the derivatives have another direction, which counts without noise and where all tensors are observed.

    Args:
        candidate: what the image found would give.
        derivatives: name of the tensor that has the derivatives in the outputs of the first layer.
        allowed: relative difference of two factors that the error of the image may cause.
        noise: of the derivatives' entries, as a share of the norm of all.
    """
    found = [_factor(name, candidate[name], observed[name], len(observed)) for name in observed]
    factors = {one.name: one for one in found if one is not None}
    if not factors:
        return ""
    most, least = max(factors.values(), key=lambda one: one.low), min(factors.values(), key=lambda one: one.high)
    if most.low - least.high > allowed * abs(least.high):
        sizes = (
            f"{most.low:.3g} times as large as the image gives in {most.name}, {least.high:.3g} times in {least.name}"
        )
        return f"the gradient is {sizes}: where each tensor is scaled by itself, the scale of the image is not known"
    largest = _TURNED + noise * candidate[derivatives].numel() ** 0.5
    whole = noise < _CLEAN and all(bool(value.any()) for value in observed.values())
    if whole and derivatives in factors and (turned := factors[derivatives].turned) > largest:
        return f"the image does not explain the direction of {derivatives} (sine {turned:.1g}, at most {largest:.1g})"
    return ""


def _factor(name: str, candidate: Tensor, observed: Tensor, tensors: int) -> _Factor | None:
    """The factor of one of so many tensors by its observed entries; None if these are too few, zero or cut off."""
    known = observed != 0
    own, seen = exact(candidate[known]), exact(observed[known])
    size, degrees = float(own.square().sum()), len(seen) - 1
    if degrees < 1 or not size or int((seen.abs() == seen.abs().max()).sum()) > 1:
        return None
    middle = float(own @ seen) / size
    rest = float((seen - middle * own).norm())
    width = float(student.isf(_DOUBT / (2 * tensors), degrees)) * rest / (size * degrees) ** 0.5
    return _Factor(name, middle - width, middle + width, rest / float(seen.norm()))
