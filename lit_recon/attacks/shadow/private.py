"""Differentially private gradient descent of shadow models: clipping, noise and privacy accounting."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lit_recon.defenses.clipping import DPSGD
from lit_recon.defenses.vectors import normal_like
from lit_recon.privacy.noisy_sgd import PrivateDescent


def mechanism_of(dp: PrivateDescent | None, steps: int) -> DPSGD | None:
    """The clipping and noise of each of so many steps; None for plain training."""
    return None if dp is None else DPSGD(dp.bound, dp.noise(steps))


def add_noise(sums: Sequence[Tensor], mechanism: DPSGD, generators: Sequence[torch.Generator]) -> None:
    """Add the noise of DP-SGD to sums of clipped gradients, in place.

    Every model has its own noise, and the adversary does not know that of a released model.

    Args:
        sums: of all models, each `(s, ...)`, in the order of the network's parameters.
        mechanism: clipping and noise.
        generators: one per model, `s` of them, each with one draw per tensor, as in `DPSGD`.
    """
    std = mechanism.released_std(1)
    if std:
        for values in sums:
            draws = [normal_like(own, generator) for own, generator in zip(values, generators, strict=True)]
            values.add_(torch.stack(draws), alpha=std)
