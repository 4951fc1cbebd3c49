"""Which inputs of a classifier's head explain the gradient of its weights, if the class counts were these?

For a batch with head inputs h_i, probabilities p_i = softmax(W h_i + b) and labels y_i, the mean cross-entropy gives

    G_b = mean_i (p_i - e_{y_i})        G_W = mean_i (p_i - e_{y_i}) h_i^T

so that, once labels are supposed, the unknown inputs have to reproduce both. The rows of G_W add up to zero and span the
inputs if there are fewer examples than classes; then there are at most as many unknowns as equations, and labels that
are wrong generically leave a residual. With more examples than that the inputs are not determined, and a weak Gaussian
prior (a mean shared by all, one by each class, and a spread) chooses among them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

#: Variance of the shared mean, of the class means, and within a class, over that of a head input.
PRIOR_VARIANCES = (1.0, 0.3, 0.3)
#: Relative rounding error of a single-precision gradient.
ROUNDING = 6e-8
#: Noise, relative to the gradient, at which the equations are first solved; then lowered to the true noise.
FIRST_NOISE = 1e-2


@dataclass(frozen=True)
class HeadGradient:
    """What the attacker sees of the head, in double precision on the CPU.

    Attributes:
        weight, bias: `(k, d)`, `(k,)`: public parameters W and b.
        weight_gradient, bias_gradient: `(k, d)`, `(k,)`: released G_W and G_b.
        n_examples: batch size.
    """

    weight: Tensor
    bias: Tensor
    weight_gradient: Tensor
    bias_gradient: Tensor
    n_examples: int

    @property
    def weight_noise(self) -> float:
        """Standard deviation per entry of what was added to G_W: its columns would otherwise add up to zero."""
        return max(_column_noise(self.weight_gradient), ROUNDING / 3 * self.weight_gradient.abs().max().item())

    @property
    def bias_noise(self) -> float:
        """The same of G_b, for which one sum is too little to go by: noise of the weights counts for it, too."""
        rounding = ROUNDING * self.bias_gradient.abs().max().item()
        return max(_column_noise(self.bias_gradient[:, None]), rounding, 0.0 if self.clean else self.weight_noise)

    @property
    def clean(self) -> bool:
        """No noise beyond rounding."""
        return _column_noise(self.weight_gradient) < 10 * ROUNDING * self.weight_gradient.abs().max().item()


def _column_noise(gradient: Tensor) -> float:
    return (gradient.sum(dim=0).square().mean() / len(gradient)).sqrt().item()
