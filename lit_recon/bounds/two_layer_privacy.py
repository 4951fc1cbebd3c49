"""What differential privacy asks of a two-layer network: its gradient's sensitivity, and the noise that hides it."""

from __future__ import annotations

import math

import torch

from lit_recon.bounds.two_layer import TwoLayerNet
from lit_recon.errors import ConfigError, UnsupportedModelError


def replacement_sensitivity(net: TwoLayerNet, lipschitz: float = 1.0) -> float:
    """How far the summed gradient moves at most, in L2, when one example is replaced by another.

    For the squared loss, inputs and targets of norm at most 1: with `S = sqrt(m) |s(0)| + L |W|`, by which
    `|s(W x)| <= S`, and the residual `R = |A| S + 1`, one example's gradient is at most `R sqrt(S^2 + (L |A|)^2)` long,
    operator norms throughout. It is a bound, not the largest value.

    Args:
        net: without biases.
        lipschitz: `L` of the activation.

    Raises:
        UnsupportedModelError: another loss, or biases.

    Source: [Liu2025], proof of proposition A.1, with constants in place of orders.
    """
    if net.loss != "squared" or bool(net.bias.any()):
        raise UnsupportedModelError(
            f"the sensitivity is known for the squared loss without biases; got {net.loss}: clip the gradients of "
            "single examples instead"
        )
    at_zero = float(net.activation.value(torch.zeros(1, dtype=net.weight.dtype)).abs())
    hidden = math.sqrt(len(net.weight)) * at_zero + lipschitz * float(torch.linalg.matrix_norm(net.weight, 2))
    head = float(torch.linalg.matrix_norm(net.head, 2))
    return 2 * (head * hidden + 1) * math.hypot(hidden, lipschitz * head)


def moments_noise(sensitivity: float, epsilon: float, delta: float) -> float:
    """Standard deviation of Gaussian noise that the moments accountant asks for.

    The least over all orders in closed form: `mu = sensitivity / std` solves `mu^2 / 2 + mu sqrt(2 log 1/delta) =
    epsilon`. The exact noise, of `lit_recon.privacy.gaussian_mu`, is a little less.

    Args:
        sensitivity: in L2, above 0.
        epsilon: above 0.
        delta: strictly between 0 and 1.

    Raises:
        ConfigError: a number out of its range.

    Source: [Liu2025], proposition A.1; the lemma is theorem 2 of Abadi et al. 2016.

    >>> round(moments_noise(sensitivity=1.0, epsilon=1.0, delta=1e-5), 3)
    4.901
    """
    if not (sensitivity > 0 and epsilon > 0 and 0 < delta < 1):
        raise ConfigError(
            f"noise needs sensitivity and epsilon above 0 and delta in (0, 1); got {sensitivity}, {epsilon}, {delta}"
        )
    root = math.sqrt(-2 * math.log(delta))
    # not the difference of two nearly equal roots
    mu = 2 * epsilon / (math.sqrt(root**2 + 2 * epsilon) + root)
    return sensitivity / mu
