"""Objectives: distances of a candidate's update to the observed one.

Every cosine is a function of two numbers per parameter tensor, the inner product <G, g> of the candidate's and the
observed gradient and the squared norm |G|^2. A custom derivative of both takes a third of autograd's passes over all
parameters.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_recon.attacks.updates.noise import expected_log_likelihood, log_likelihood, noise_of
from lit_recon.defenses.vectors import where_observed
from lit_recon.errors import ConfigError, ThreatModelError
from lit_recon.records import Noise, NoiseFamily, Observation, Update


class ObservedUpdate(NamedTuple):
    """An observed update, the squared norm of each tensor, and the expected log-likelihood, see `Likelihood`."""

    update: Update
    squared_norms: dict[str, Tensor]
    expected: Tensor

    @staticmethod
    def of(update: Update) -> ObservedUpdate:
        """With the norms of `update`, and nothing expected; a `ThreatModelError` if it is zero everywhere."""
        squared = {name: value.square().sum() for name, value in update.items()}
        if all(float(value) == 0 for value in squared.values()):
            raise ThreatModelError("the observed update is zero everywhere: there is nothing to match")
        return ObservedUpdate(update, squared, torch.zeros_like(next(iter(squared.values()))))


class Objective(ABC):
    """A distance between updates, 0 for equal ones."""

    #: Whether the candidate's update is used; otherwise it is not computed.
    matches: bool = True

    def for_victims(self, observation: Observation) -> Objective:
        """The objective for a victim and others of the same client; by default it is the same for all clients."""
        return self

    def observed(self, observation: Observation) -> ObservedUpdate:
        """What the objective compares candidates of this victim with."""
        return ObservedUpdate.of(observation.update)

    @abstractmethod
    def __call__(self, candidate: Update, target: ObservedUpdate) -> Tensor:
        """Distance of the candidate's update to the observed one; a scalar, differentiable in the candidate."""


class GlobalCosine(Objective):
    """`1 - <G, g> / (|G| |g|)` over all parameters as one vector. Source: [Geiping2020]."""

    def __call__(self, candidate: Update, target: ObservedUpdate) -> Tensor:
        inner, squared, observed = _products(candidate, target)
        return 1 - inner.sum() / (_root(squared.sum()) * _root(observed.sum()))


class FeaturesOnly(Objective):
    """Ignores the update: only recovered features, known BatchNorm statistics and priors are optimized.

    Source: the `direct` inversion of [Kariyappa2023].
    """

    matches = False

    def __call__(self, candidate: Update, target: ObservedUpdate) -> Tensor:
        return next(iter(target.update.values())).new_zeros(())


class LayerwiseCosine(Objective):
    """Mean over parameter tensors of 1 - cos(G_l, g_l); tensors with zero observed gradient are left out."""

    def __call__(self, candidate: Update, target: ObservedUpdate) -> Tensor:
        inner, squared, observed = _products(candidate, target)
        seen = (observed > 0).to(inner.dtype)
        cosine = inner / (_root(squared) * _root(observed))
        return (seen * (1 - cosine)).sum() / seen.sum()


class NormReweightedCosine(Objective):
    """Global cosine after division of every tensor of both updates by `|g_l|^power`.

    At power 1 every observed tensor has unit norm, so that large layers do not dominate; at power 0 this is
    `GlobalCosine`. Tensors with zero observed gradient are left out.

    Source: [Liu2025], appendix F, in words ("reweighting the gradients by their norm") without a power.
    """

    def __init__(self, power: float = 1.0) -> None:
        if not 0 <= power <= 2:
            raise ConfigError(f"NormReweightedCosine needs a power in [0, 2]; got {power:g}")
        self.power = power

    def __call__(self, candidate: Update, target: ObservedUpdate) -> Tensor:
        inner, squared, observed = _products(candidate, target)
        seen = observed > 0
        # over the least norm: weights of at most 1 do not overflow
        ratios = torch.where(seen, observed / torch.where(seen, observed, math.inf).min(), 1.0)
        weights = seen * ratios.pow(-self.power)
        norms = _root((weights * squared).sum()) * _root((weights * observed).sum())
        return 1 - (weights * inner).sum() / norms


class SquaredError(Objective):
    """Squared Euclidean distance, summed over all parameters. Source: [Zhu2019].

    Args:
        relative: divide by `|g|^2`, so that weights of priors are comparable between networks.
    """

    def __init__(self, relative: bool = False) -> None:
        self.relative = relative

    def __call__(self, candidate: Update, target: ObservedUpdate) -> Tensor:
        distances = [(candidate[name] - observed).square().sum() for name, observed in target.update.items()]
        total = torch.stack(distances).sum()
        return total / torch.stack(list(target.squared_norms.values())).sum() if self.relative else total


def _root(squared: Tensor) -> Tensor:
    """The square root, with a finite derivative at zero."""
    return squared.clamp_min(torch.finfo(squared.dtype).tiny).sqrt()


def _products(candidate: Update, target: ObservedUpdate) -> tuple[Tensor, Tensor, Tensor]:
    """Per tensor: inner product with the observed update, squared norms of candidate and observed update."""
    names = list(target.update)
    tensors = (*(candidate[name] for name in names), *target.update.values())
    if torch.compiler.is_compiling():  # the compiler fuses the passes itself, and does not vmap a custom rule
        inner, squared = _inner_products(*tensors)
    else:
        inner, squared = _InnerProducts.apply(*tensors)  # type: ignore[no-untyped-call] # PyTorch does not type it
    return inner, squared, torch.stack([target.squared_norms[name] for name in names])


def _inner_products(*tensors: Tensor) -> tuple[Tensor, Tensor]:
    """(G_1..G_t, g_1..g_t) -> (<G_l, g_l>)_l, (|G_l|^2)_l."""
    half = len(tensors) // 2
    flat = [tensor.reshape(-1) for tensor in tensors]
    inner = torch.stack([torch.dot(a, b) for a, b in zip(flat[:half], flat[half:], strict=True)])
    return inner, torch.stack([torch.dot(a, a) for a in flat[:half]])


class _InnerProducts(torch.autograd.Function):
    """`_inner_products` with a derivative in one pass; differentiable once, in G only."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return _inner_products(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        half = len(ctx.saved_tensors) // 2
        pairs = zip(ctx.saved_tensors[:half], ctx.saved_tensors[half:], *gradients, strict=True)
        moves = [torch.addcmul(ours * (2 * squared), seen, inner) for ours, seen, inner, squared in pairs]
        return (*moves, *([None] * half))


class Observed(Objective):
    """An objective restricted to coordinates whose observed value is not exactly zero.

    For attackers who do not know that the client prunes or drops coordinates; those who know it simulate the defense
    (`knowledge.defense`). Without such a defense information is lost: after a ReLU, true gradients are zero too, and
    should be matched.

    Source: the code of [Jeon2021], with the mask taken from the sparse gradient.
    """

    def __init__(self, objective: Objective) -> None:
        self.objective = objective

    def for_victims(self, observation: Observation) -> Objective:
        return Observed(self.objective.for_victims(observation))

    def observed(self, observation: Observation) -> ObservedUpdate:
        return self.objective.observed(observation)

    def __call__(self, candidate: Update, target: ObservedUpdate) -> Tensor:
        return self.objective(where_observed(candidate, target.update), target)


class Likelihood(Objective):
    """Minus the log-likelihood of the observed update, in nats per pixel of the batch, for updates with noise.

    Its expectation at the true images is subtracted: there it is about 0, for p coordinates of normal noise with a
    standard deviation of sqrt(p / 2) / pixels. With the negative log-density of a pixel as prior, the minimum is at the
    most probable images. An attacker who knows the defense knows family and scale of the noise; otherwise the scale is
    that of each candidate's own residual (profile likelihood), and in the expectation an estimate for each victim.

    Args:
        family: of the noise if the attacker does not know the defense.
    """

    def __init__(self, family: NoiseFamily = "gaussian") -> None:
        if family not in ("gaussian", "laplace"):
            raise ConfigError(f"Likelihood needs the family 'gaussian' or 'laplace'; got {family!r}")
        self.family: NoiseFamily = family
        self._known: Noise | None = None
        self._pixels = 1

    def for_victims(self, observation: Observation) -> Likelihood:
        """The likelihood under the noise of the client; a `ThreatModelError` if that is of another kind."""
        own = copy(self)
        noise, known = noise_of(observation, self.family)
        own._known = noise if known else None
        own._pixels = observation.n_examples * math.prod(observation.image_shape)
        return own

    def observed(self, observation: Observation) -> ObservedUpdate:
        noise, _ = noise_of(observation, self.family)
        seen = super().observed(observation)
        return seen if noise is None else seen._replace(expected=expected_log_likelihood(seen.update, noise))

    def __call__(self, candidate: Update, target: ObservedUpdate) -> Tensor:
        loss = target.expected - log_likelihood(candidate, target.update, self._known, self.family)
        # float64 up to here: two sums over all coordinates nearly cancel
        return (loss / self._pixels).to(next(iter(target.update.values())).dtype)
