"""Gaussian and Laplace noise on gradients, on all entries or on those chosen by the sparse vector technique."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lit_recon.defenses.base import Defense, Round, Stage, checked, positive
from lit_recon.defenses.release import require_separable
from lit_recon.defenses.vectors import (
    entrywise,
    flatten,
    laplace_like,
    normal_like,
    size,
    squared_norm,
    unflatten,
    uniform_like,
    where_observed,
)
from lit_recon.errors import ConfigError
from lit_recon.noisy_release import NoisyRelease
from lit_recon.records import BatchNormMode, Noise, Update

if TYPE_CHECKING:
    from lit_recon.bounds.fisher import Jacobian


def with_normal_noise(values: Update, std: float | Tensor, generator: torch.Generator) -> Update:
    """The values plus independent normal noise; one draw per tensor, none where `std` is the number 0."""
    if not isinstance(std, Tensor) and std == 0:
        return values
    return {name: value + std * normal_like(value, generator) for name, value in values.items()}


class GaussianNoise(Defense):
    """Adds independent normal noise of mean 0 to every coordinate, by default of the mean gradient, after averaging.

    Without a clipping bound there is no differential privacy. One draw of `randn` per tensor; none for a `std` of 0.

    Args:
        std: standard deviation of one coordinate's noise, absolute: independent of batch size and gradient.
        relative: `std` is in units of the root mean square of the mean gradient's coordinates.
        before_averaging: add the noise to each example's gradient: `std / sqrt(n)` on the mean; not `relative`.

    Source: [Zhu2019], section 5.1; [Liu2025], section 5, with 0.001, 0.01 and 0.1.
    """

    neutral = (("std", 0.0),)

    def __init__(self, std: float = 0.0, relative: bool = False, before_averaging: bool = False) -> None:
        self.std = checked(self, "std", std)
        if relative and before_averaging:
            raise ConfigError(
                "GaussianNoise is relative to the mean gradient and cannot be added before averaging: "
                "set before_averaging to false"
            )
        self.relative, self.before_averaging = relative, before_averaging

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stage selected by `before_averaging`."""
        return (Stage.PER_EXAMPLE,) if self.before_averaging else (Stage.UPDATE,)

    def prepare(self, model: nn.Module, batch_norm: BatchNormMode = "eval") -> nn.Module:
        if self.before_averaging:
            require_separable(model, batch_norm, self)
        return model

    def transform_per_example(self, gradients: Update, generator: torch.Generator) -> Update:
        return with_normal_noise(gradients, self.std, generator) if self.before_averaging else gradients

    def transform_update(self, update: Update, round_: Round, generator: torch.Generator) -> Update:
        if self.before_averaging or self.std == 0:
            return update
        scale = (squared_norm(update) / size(update)).sqrt() if self.relative else 1.0
        return with_normal_noise(update, self.std * scale, generator)

    def released_std(self, n_examples: int) -> float:
        if self.relative and self.std:
            raise ConfigError(f"no bound is known for {self}: the size of relative noise depends on the images")
        return self.std / math.sqrt(n_examples) if self.before_averaging else self.std

    def without_noise(self) -> Defense:
        return Defense()

    def linearized(
        self, jacobian: Jacobian, round_: Round, generator: torch.Generator
    ) -> tuple[Jacobian, NoisyRelease]:
        if self.relative and self.std:
            scale = float((squared_norm(jacobian.update) / size(jacobian.update)).sqrt())
            return jacobian, NoisyRelease(
                self.std * scale, notes=("the information in the size of the noise is left out",)
            )
        if self.before_averaging:
            jacobian = jacobian.after_clipped_examples(round_.single_gradients(), math.inf)
        return jacobian, NoisyRelease(self.released_std(len(round_.batch.images)) or None)


class LaplaceNoise(Defense):
    """Adds independent Laplace noise of mean 0 to every coordinate of the mean gradient, after averaging.

    One draw of `rand` per tensor, by the inverse of the distribution function; none for a scale of 0.
    Source: [Zhu2019], section 5.1.

    Args:
        scale: mean absolute value of the noise on a coordinate, whose standard deviation is `sqrt(2) scale`. It is not
            an epsilon: a larger scale is more noise.
    """

    neutral = (("scale", 0.0),)

    def __init__(self, scale: float = 0.0) -> None:
        self.scale = checked(self, "scale", scale)

    def transform_update(self, update: Update, round_: Round, generator: torch.Generator) -> Update:
        if self.scale == 0:
            return update
        return {name: value + self.scale * laplace_like(value, generator) for name, value in update.items()}

    def released_std(self, n_examples: int) -> float:
        if self.scale:
            raise ConfigError(f"no bound is known for {self}: its noise is not Gaussian")
        return 0.0

    def released_noise(self, n_examples: int) -> Noise | None:
        return Noise("laplace", self.scale) if self.scale else None

    def linearized(
        self, jacobian: Jacobian, round_: Round, generator: torch.Generator
    ) -> tuple[Jacobian, NoisyRelease]:
        return jacobian, NoisyRelease(self.scale or None, family="laplace")


class SVTPrivacy(Defense):
    """Shares a fraction of the entries, chosen by the sparse vector technique, clipped and with Laplace noise.

    Of `p` entries `c = ceil(fraction p)` are shared. With weight differences per step `d`, clipped to [-gamma, gamma]:

    - threshold: `T = tau + Lap(gamma / e1)`, with `e1 : e2 = 1 : (2c)^(2/3)` and `e1 + e2 = epsilon`;
    - passes over all entries not yet accepted: each is where `|d| + Lap(2 c gamma / e2) >= T`, until at least `c` are;
    - of those accepted `c` are drawn; they are released as `d + Lap(2 gamma / noise_var)`, all others as zero.

    The number of the pass in which an entry is accepted is geometric: it is drawn directly, so that no threshold is too
    high, where NVFlare goes on forever. Random numbers: the threshold's, one `rand` per tensor for the passes, one call
    for the choice, one `rand` per tensor for the noise, none of them if `fraction` is 0, which releases zeros. There is
    no setting that changes nothing. The attacker clips a candidate's entries and knows the mask and the noise.

    No guarantee of privacy is claimed here: `epsilon` counts `c` accepted entries, the last pass may accept more, and
    tensors without dimensions pass unchanged.

    Args:
        fraction: share of the entries to release, in [0, 1].
        epsilon: budget of the choice, above 0.
        noise_var: budget of the noise on one released entry, above 0; not a variance: larger is less noise. The
            standard deviation is `sqrt(8) gamma / noise_var`. NVFlare's `epsilon_release` is `c noise_var`; its other
            optional divisions of the budget are left out.
        gamma: largest absolute value of an entry as a weight difference per local step, above 0.
        tau: threshold before its noise, a weight difference per local step.
        replace: draw with replacement: fewer than `c` entries are then released.
        lr: weight difference per local step that an entry of 1 stands for, see `PercentilePrivacy`.

    Defaults are NVFlare's. Source: NVFlare 2.9, `SVTPrivacy`; selective sharing by the sparse vector technique is of
    [Shokri2015], the technique of [Dwork2014], section 3.6, the division of epsilon of [Lyu2017].
    """

    def __init__(
        self,
        fraction: float = 0.1,
        epsilon: float = 0.1,
        noise_var: float = 0.1,
        gamma: float = 1e-5,
        tau: float = 1e-6,
        replace: bool = True,
        lr: float = 1.0,
    ) -> None:
        self.fraction = checked(self, "fraction", fraction, high=1.0)
        self.epsilon, self.noise_var = positive(self, "epsilon", epsilon), positive(self, "noise_var", noise_var)
        self.gamma, self.lr = positive(self, "gamma", gamma), positive(self, "lr", lr)
        self.tau, self.replace = checked(self, "tau", tau, low=-math.inf), replace

    def transform_update(self, update: Update, round_: Round, generator: torch.Generator) -> Update:
        shared = self._shared(update, generator) if self.fraction else flatten(update).new_zeros(size(update)).bool()
        limit, released = self.gamma / self.lr, {}
        for name, mask in unflatten(shared, update).items():
            value = update[name]
            if value.dim() == 0:
                released[name] = value
            elif self.fraction:
                noisy = value.clamp(-limit, limit) + self._noise.scale * laplace_like(value, generator)
                released[name] = torch.where(mask, noisy, 0.0)
            else:
                released[name] = torch.zeros_like(value)
        return released

    def simulate(self, candidate: Update, observed: Update) -> Update:
        limit = self.gamma / self.lr
        return entrywise(where_observed(candidate, observed), lambda value: value.clamp(-limit, limit))

    def released_std(self, n_examples: int) -> float:
        raise ConfigError(f"no bound is known for {self}: its noise is not Gaussian")

    def released_noise(self, n_examples: int) -> Noise | None:
        return self._noise

    @property
    def reads_zeros(self) -> bool:
        """Always."""
        return True

    @property
    def _noise(self) -> Noise:
        return Noise("laplace", 2 * self.gamma / self.noise_var / self.lr)

    def _shared(self, update: Update, generator: torch.Generator) -> Tensor:
        """Which of all entries `(p,)` are released."""
        count = math.ceil(self.fraction * size(update))
        ratio = (2 * count) ** (2 / 3)
        of_threshold, of_query = self.epsilon / (1 + ratio), self.epsilon * ratio / (1 + ratio)
        exact = {name: self.lr * value.detach().double() for name, value in update.items()}
        zero = flatten(exact).new_zeros(())
        threshold = self.tau + self.gamma / of_threshold * laplace_like(zero, generator)
        passes = []
        for value in exact.values():
            response = value.abs().clamp_max(self.gamma)
            passes.append(_log_waiting(response - threshold, 2 * count * self.gamma / of_query, generator).flatten())
        accepted = _first_passes(torch.cat(passes), count).nonzero().flatten()
        shape = (count,) if self.replace else (len(accepted),)
        order = uniform_like(accepted.new_empty(shape, dtype=torch.float64), generator)
        # uniform numbers are below 1
        drawn = (order * len(accepted)).long() if self.replace else order.argsort()[:count]
        return torch.zeros_like(passes[0].new_empty(size(update)), dtype=torch.bool).index_fill(
            0, accepted[drawn], True
        )


def _log_waiting(excess: Tensor, scale: float, generator: torch.Generator) -> Tensor:
    """Logarithms of times, float64, which rounded up are the first of independent trials `excess + Lap(scale) >= 0`.

    A geometric variable of success probability `q` is an exponential one of rate -log(1 - q), rounded up.
    """
    far = excess.abs() / scale
    # log(-log(1 - q)) with q = 1 - exp(-far) / 2 above the threshold, and exp(-far) / 2 below
    above = (math.log(2) + far).log()
    below = torch.where(far > 30, -math.log(2) - far, (-torch.log1p(-0.5 * (-far).exp())).log())
    exponential = -torch.log1p(-uniform_like(excess, generator))
    return exponential.log() - torch.where(excess >= 0, above, below)


def _first_passes(log_waiting: Tensor, count: int) -> Tensor:
    """Mask of entries accepted in the passes up to the one in which `count` of them are."""
    last = float(log_waiting.kthvalue(count).values)
    # beyond exp(36) whole numbers are all float64 has
    end = last if last > 36 else math.log(max(1, math.ceil(math.exp(last))))
    return log_waiting <= max(last, end)
