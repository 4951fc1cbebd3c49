"""What a defense does to an update, in the words of a bound: clipped, dropped, and hidden by Gaussian noise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lit_recon.bounds import GaussianRelease, Jacobian, example_clipped_information, fisher_information
from lit_recon.defenses import (
    DPSGD,
    Batch,
    BatchGradient,
    Chain,
    Defense,
    GaussianNoise,
    GradientClipping,
    GradientDropout,
    GradientPruning,
    OptimalGradientNoise,
    OptimalGradientPruning,
    PerExampleClipping,
    Round,
    sensitivities,
)
from lit_recon.errors import ConfigError
from lit_recon.records import Update

#: Defenses whose counterpart, given what they did, is all that they do to the mean of a release.
_SIMULATED = (GradientClipping, GradientDropout, GradientPruning, OptimalGradientPruning, PerExampleClipping)


@dataclass(frozen=True)
class Released:
    """A defended update, and what it tells.

    Attributes:
        update: what `release` is applied to.
        release: clipping, mask and noise.
        information: about the inputs, `(q, q)`.
        notes: what the information leaves out.
    """

    update: Update
    release: GaussianRelease
    information: Tensor
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, jacobian: Jacobian, release: GaussianRelease, *notes: str) -> Released:
        """A release of the update at which a Jacobian was taken."""
        return cls(jacobian.update, release, fisher_information(jacobian, release), notes)


def acting(defense: Defense) -> list[Defense]:
    """The defenses of a chain that do anything, in order.

    >>> acting(Chain([Defense(), GaussianNoise(std=0.1)]))
    [GaussianNoise(std=0.1, relative=False, before_averaging=False)]
    """
    if isinstance(defense, Chain):
        return [one for part in defense.defenses for one in acting(part)]
    return [defense] if defense.stages else []


def released_std(defense: Defense, n_examples: int) -> float:
    """Standard deviation of the Gaussian noise on every coordinate of what a client with this defense releases.

    Raises:
        ConfigError: there is none, or it is not of a known, fixed size; the message says why no bound exists.

    >>> released_std(DPSGD(bound=1.0, noise_multiplier=0.5), n_examples=4)
    0.125
    """
    parts = acting(defense)
    odd = [part for part in parts[:-1] if not isinstance(part, _SIMULATED)]
    last = parts[-1] if parts else None
    if odd:
        raise ConfigError(f"what {type(odd[0]).__name__} does to a batch has no derivative here")
    if isinstance(last, GaussianNoise) and last.std > 0:
        if last.relative:
            raise ConfigError("the size of relative noise tells about the images too, which no bound here counts")
        return last.std / math.sqrt(n_examples) if last.before_averaging else last.std
    if isinstance(last, DPSGD) and last.noise_multiplier > 0:
        return last.std(n_examples)
    if isinstance(last, OptimalGradientNoise) and last.std > 0:
        raise ConfigError("the variances of OptimalGradientNoise tell about the images too, which no bound here counts")
    if last is None or isinstance(last, (*_SIMULATED, GaussianNoise, DPSGD, OptimalGradientNoise)):
        raise ConfigError("without noise an update may give its images away exactly: the only bound is 0")
    raise ConfigError(f"what {type(last).__name__} adds is not Gaussian noise on the update")


def defended_release(
    defense: Defense, jacobian: Jacobian, batch: Batch, gradient: BatchGradient, std: float, generator: torch.Generator
) -> Released:
    """A defended update of a network whose own Jacobian is known, with Gaussian noise of the defense's own or of `std`.

    Masks and variances are drawn or computed once and then count as fixed.

    Args:
        defense: a single one.
        jacobian: of the undefended update.
        batch: whose inputs are to be bounded.
        gradient: of the loss summed over a batch.
        std: of the noise where the defense has none.
        generator: of the defense's random numbers.

    Raises:
        ConfigError: a defense that is not known here.
    """
    update = jacobian.update
    if isinstance(defense, GradientClipping):
        return Released.of(jacobian, GaussianRelease(std, bound=defense.bound))
    if isinstance(defense, GaussianNoise) and not (defense.before_averaging or defense.relative):
        return Released.of(jacobian, GaussianRelease(defense.std))
    if isinstance(defense, OptimalGradientNoise):
        found = defense.variances(update, sensitivities(gradient, batch, defense.directions, generator))
        kept = {name: value > 0 for name, value in found.items()}
        spread = {name: torch.where(kept[name], value, 1.0).sqrt() for name, value in found.items()}
        return Released.of(jacobian, GaussianRelease(spread, kept), "what the variances tell by themselves is left out")
    if isinstance(defense, DPSGD):
        singles = [gradient(batch.examples(i, i + 1)) for i in range(len(batch.images))]
        own = defense.std(len(singles)) or std
        information, mean = example_clipped_information(jacobian, singles, defense.bound, own)
        return Released(mean, GaussianRelease(own), information)
    rescaled = isinstance(defense, GradientDropout) and defense.rescale
    if isinstance(defense, GradientDropout | GradientPruning | OptimalGradientPruning) and not rescaled:
        sparse = defense.transform_update(update, Round(batch, gradient), generator)
        kept = {name: value != 0 for name, value in sparse.items()}
        random = isinstance(defense, GradientDropout)
        notes = () if random else ("what the choice of coordinates tells by itself is left out",)
        return Released.of(jacobian, GaussianRelease(std, kept), *notes)
    raise ConfigError(f"the theory study has no bound for {defense}: take clipping, noise, dropout, pruning or DPSGD")


def quiet(defense: Defense) -> Defense:
    """A defense without the noise that it ends in, to find out what it drops."""
    parts: list[Any] = [part for part in acting(defense) if not isinstance(part, GaussianNoise | DPSGD)]
    return Chain(parts)
