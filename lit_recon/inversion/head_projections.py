"""Which inputs of the head explain its gradient, if the class counts were these? The case of many examples.

With as many examples as classes or more the equations of `head_equations` no longer determine the inputs: other counts
can explain the gradient, too. What still tells them apart is that inputs behind a ReLU are not negative. Inputs are
projected in turn onto the non-negative ones, onto those that give the gradient of the weights (with the probabilities
as they are), and onto those that give the gradient of the bias (linearised); the residual left after a fixed number of
rounds says how hard it is to satisfy all three.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lit_recon.inversion.head import HeadGradient
from lit_recon.inversion.head_equations import Fit, prior_guess

#: Damping of the two linear systems, relative to their mean eigenvalue.
WEIGHT_DAMPING, BIAS_DAMPING = 1e-4, 1e-2
#: Share of a projection that is taken. Whole steps overshoot, as each equation is solved as if the other held still,
#: and go round in circles for some starts: with them no seed of six came to a residual below 0.1 where 0.3 comes to 0.
RELAXATION = 0.3


class HeadProjections:
    """Alternating projections of the head's inputs.

    Args:
        head: with any number of examples.
    """

    def __init__(self, head: HeadGradient) -> None:
        self.head = head
        self.gram = head.weight @ head.weight.T

    def solve(self, counts: Tensor, seed: int = 0, rounds: int = 120) -> Fit:
        """Fit for supposed class counts `(k,)`; another seed starts elsewhere.

        Never `explained`, because other counts might be, too.
        """
        head = self.head
        n = head.n_examples
        targets = torch.eye(len(counts), dtype=torch.float64).repeat_interleave(counts, dim=0)
        inputs = prior_guess(targets, head.weight_gradient, seed)
        for _ in range(rounds):
            inputs = inputs.clamp(min=0) if head.non_negative else inputs
            errors = self._probabilities(inputs) - targets
            excess = errors.T @ inputs - n * head.weight_gradient
            inputs = inputs - RELAXATION * errors @ _damped_solve(errors.T @ errors, excess, WEIGHT_DAMPING)
            p = self._probabilities(inputs)
            surplus = (p - targets).sum(dim=0) - n * head.bias_gradient
            slopes = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
            reach = torch.einsum("iab,icb->ac", slopes @ self.gram, slopes)
            inputs = inputs - RELAXATION * slopes @ _damped_solve(reach, surplus, BIAS_DAMPING) @ head.weight
        inputs = inputs.clamp(min=0) if head.non_negative else inputs
        probabilities = self._probabilities(inputs)
        errors = probabilities - targets
        bias_residual = errors.mean(dim=0) - head.bias_gradient
        weight_residual = errors.T @ inputs / n - head.weight_gradient
        residual = float(
            bias_residual.norm() / head.bias_gradient.norm() + weight_residual.norm() / head.weight_gradient.norm()
        )
        score = residual if math.isfinite(residual) else math.inf
        return Fit(score, residual, probabilities.sum(dim=0), explained=False)

    def _probabilities(self, inputs: Tensor) -> Tensor:
        return torch.softmax(inputs @ self.head.weight.T + self.head.bias, dim=1)


def _damped_solve(matrix: Tensor, right: Tensor, damping: float) -> Tensor:
    # the floor keeps the matrix regular where all probabilities are 0 or 1
    floor = damping * matrix.diagonal().mean() + 1e-12
    solution: Tensor = torch.linalg.solve(matrix + floor * torch.eye(len(matrix), dtype=matrix.dtype), right)
    return solution
