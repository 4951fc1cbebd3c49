"""Optimizer and mini-batches for training many models at once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lit_recon.attacks.shadow.training import ADAM_DECAY, ADAM_EPSILON, GradientDescent, KnownTraining
from lit_recon.defenses.clipping import DPSGD
from lit_recon.defenses.vectors import normal_like


def mechanism_of(known: KnownTraining) -> DPSGD | None:
    """Clipping and noise of every step; None for plain training."""
    dp = known.descent.dp
    return None if dp is None else DPSGD(dp.bound, dp.noise(known.n_steps))


def add_noise(sums: Sequence[Tensor], mechanism: DPSGD, generators: Sequence[torch.Generator]) -> None:
    """Add the noise of DP-SGD to sums `(s, ...)` of clipped gradients in place, by one generator per model."""
    std = mechanism.released_std(1)
    if std:
        for values in sums:
            draws = [normal_like(own, generator) for own, generator in zip(values, generators, strict=True)]
            values.add_(torch.stack(draws), alpha=std)


class Descent:
    """The optimizer of all models with its state; updates weights of any shape in place."""

    def __init__(self, settings: GradientDescent, weights: Sequence[Tensor]) -> None:
        self.settings, self.weights = settings, weights
        self._means = [torch.zeros_like(weight) for weight in weights]
        self._squares = [torch.zeros_like(weight) for weight in weights] if settings.optimizer == "adam" else []
        self._steps = 0

    def step(self, gradients: Sequence[Tensor], scale: float = 1.0) -> None:
        """One step with the gradients `scale * gradients`, which may be overwritten."""
        self._steps += 1
        if self._squares:
            self._adam(gradients, scale)
            return
        for weight, speed, gradient in zip(self.weights, self._means, gradients, strict=True):
            speed.mul_(self.settings.momentum).add_(gradient, alpha=scale)
            weight.add_(speed, alpha=-self.settings.lr)

    def _adam(self, gradients: Sequence[Tensor], scale: float) -> None:
        decay, lr = self.settings.momentum, self.settings.lr
        rate = lr / (1 - decay**self._steps)
        root = math.sqrt(1 - ADAM_DECAY**self._steps)
        for weight, mean, square, gradient in zip(self.weights, self._means, self._squares, gradients, strict=True):
            mean.mul_(decay).add_(gradient, alpha=scale * (1 - decay))
            square.mul_(ADAM_DECAY).addcmul_(gradient, gradient, value=scale**2 * (1 - ADAM_DECAY))
            weight.addcdiv_(mean, square.sqrt().div_(root).add_(ADAM_EPSILON), value=-rate)


class Batches:
    """The mini-batches of many models, as indices: 0 to n - 1 for the fixed set, n for the model's own image.

    Their order has one generator if it is known, one per model if it is not; full batches have none.
    """

    def __init__(self, known: KnownTraining, generators: Sequence[torch.Generator] | None) -> None:
        self.known, self.generators = known, list(generators or ())

    def of(self, members: slice) -> Iterator[Tensor | None]:
        """Of every step: None for all images, `(b,)` for a batch of all these models, `(s, b)` if each has its own."""
        descent, left = self.known.descent, self.known.n_steps
        if descent.batch_size is None:
            yield from [None] * left
            return
        drawing = self.generators[members] if descent.has_own_order else [self.generators[0].clone_state()]
        while left:
            orders = torch.stack([torch.randperm(len(self.known.images) + 1, generator=own) for own in drawing])
            for batch in orders.split(descent.batch_size, dim=1)[:left]:
                left -= 1
                numbers = batch.to(self.known.images.device)
                yield numbers if descent.has_own_order else numbers[0]


def gathered(fixed: Tensor, own: Tensor, numbers: Tensor) -> Tensor:
    """Images or labels `(s, b, ...)` at indices `(s, b)`: 0 to n - 1 of the fixed `(n, ...)`, n of the own `(s, ...)`.

    >>> gathered(torch.tensor([10, 11, 12]), torch.tensor([7, 8]), torch.tensor([[0, 3], [2, 1]])).tolist()
    [[10, 7], [12, 11]]
    """
    is_own = numbers == len(fixed)
    found = fixed[numbers.clamp(max=len(fixed) - 1)]
    found[is_own] = own[is_own.nonzero()[:, 0]]
    return found
