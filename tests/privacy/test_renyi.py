"""The Renyi bound of reconstruction, from the accountant's curve, against the best bound."""

from __future__ import annotations

import math

import numpy as np
from opacus.accountants.analysis.rdp import compute_rdp

from lit_recon.bounds import profile_bound, renyi_bound
from lit_recon.privacy.noisy_sgd import PoissonSGD


def test_theorem_2_with_the_curve_is_above_the_best_bound() -> None:
    orders = [float(order) for order in np.arange(2, 20)]
    curve = compute_rdp(q=0.1, noise_multiplier=1.0, steps=50, orders=orders)
    training = PoissonSGD(1.0, 50, sampling_rate=0.1)
    for kappa in (0.1, 1e-3):
        best = profile_bound(math.log(kappa), training.profile)
        assert best < renyi_bound(math.log(kappa), orders, curve) < 5 * best
