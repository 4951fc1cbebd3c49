"""One step of the optimizer for many models at once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lit_recon.informed.shadow.training import ADAM_DECAY, ADAM_EPSILON, GradientDescent


class Descent:
    """What the optimizer remembers of all models, whose weights it changes in place.

    Args:
        settings: of the optimizer.
        weights: tensors of any shape; they stay the caller's.
    """

    def __init__(self, settings: GradientDescent, weights: Sequence[Tensor]) -> None:
        self.settings, self.weights = settings, weights
        self._means = [torch.zeros_like(weight) for weight in weights]
        self._squares = [torch.zeros_like(weight) for weight in weights] if settings.optimizer == "adam" else []
        self._steps = 0

    def step(self, gradients: Sequence[Tensor], scale: float = 1.0) -> None:
        """Go one step along `scale * gradients`, which may be overwritten."""
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
