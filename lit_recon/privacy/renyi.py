"""Renyi divergence of sampled noisy SGD, by Opacus: looser than the loss distribution, and quick at any length.

Source: Mironov, Talwar and Zhang 2019, Renyi differential privacy of the sampled Gaussian mechanism.
"""

from __future__ import annotations

from collections.abc import Sequence

from lit_recon.errors import ConfigError

#: Orders from nearly 1, which large epsilons need, to 512, which small ones need.
ORDERS = (*(1 + 0.02 * i for i in range(1, 50)), *(2 + 0.25 * i for i in range(32)), *range(10, 64), 64, 128, 256, 512)


def renyi_curve(
    noise_multiplier: float, steps: int, sampling_rate: float = 1.0, orders: Sequence[float] = ORDERS
) -> list[float]:
    """Renyi divergence at each order, of outputs with a record from those without (`add_or_remove_one`).

    Args:
        noise_multiplier: standard deviation of the noise over the clipping norm, above 0.
        steps: number of releases.
        sampling_rate: chance of a record to enter a batch, in (0, 1].
        orders: each above 1.

    Raises:
        ConfigError: if an argument is out of its range.

    >>> renyi_curve(noise_multiplier=2.0, steps=4, orders=[3.0])
    [1.5]
    """
    if noise_multiplier <= 0 or steps < 1 or not 0 < sampling_rate <= 1 or min(orders, default=0) <= 1:
        raise ConfigError(
            "a Renyi curve needs noise_multiplier above 0, steps of at least 1, sampling_rate in (0, 1] and orders "
            f"above 1; got {noise_multiplier}, {steps}, {sampling_rate} and {min(orders, default=None)}"
        )
    from opacus.accountants.analysis.rdp import compute_rdp

    curve = compute_rdp(q=sampling_rate, noise_multiplier=noise_multiplier, steps=steps, orders=list(orders))
    return [float(divergence) for divergence in curve]
