"""The likelihood of an update with noise, as an objective."""

from __future__ import annotations

import math
from copy import copy

from torch import Tensor

from lit_recon.attacks.updates.gradient_matching.objectives import Objective, ObservedUpdate
from lit_recon.attacks.updates.noise import noise_of
from lit_recon.defenses.likelihood import expected_log_likelihood, log_likelihood
from lit_recon.errors import ConfigError
from lit_recon.records import Noise, NoiseFamily, Observation, Update


class Likelihood(Objective):
    """Minus the log-likelihood of the observed update, in nats per pixel of the batch, for updates with noise.

    Its expectation at the true images is subtracted: there it is about 0, for p coordinates of normal noise with a
    standard deviation of sqrt(p / 2) / pixels. With the negative log-density of a pixel as prior, the minimum is at the
    most probable images. An attacker who knows the defense knows family and scale of the noise; otherwise the scale is
    that of each candidate's own residual (profile likelihood).

    Args:
        family: of the noise if the attacker does not know the defense.
    """

    def __init__(self, family: NoiseFamily = "gaussian") -> None:
        if family not in ("gaussian", "laplace"):
            raise ConfigError(f"Likelihood needs the family 'gaussian' or 'laplace'; got {family!r}")
        self.family: NoiseFamily = family
        self._known: Noise | None = None
        self._estimated: Noise | None = None
        self._pixels = 1

    def for_victims(self, observation: Observation) -> Likelihood:
        """The likelihood under the noise of the client; a `ThreatModelError` if that is of another kind."""
        own = copy(self)
        noise, known = noise_of(observation, self.family)
        own._known, own._estimated = (noise, noise) if known else (None, noise)
        own._pixels = observation.n_examples * math.prod(observation.image_shape)
        return own

    def __call__(self, candidate: Update, target: ObservedUpdate) -> Tensor:
        loss = -log_likelihood(candidate, target.update, self._known, self.family)
        if self._estimated is not None:
            loss = loss + expected_log_likelihood(target.update, self._estimated)
        # float64 up to here: two sums over all coordinates nearly cancel
        return (loss / self._pixels).to(next(iter(target.update.values())).dtype)
