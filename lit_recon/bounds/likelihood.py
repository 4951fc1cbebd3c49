"""Gauss-Newton on the Gaussian likelihood of a two-layer network's release: does anything attain the bound?

It begins at the truth, so that it is no attack. Where its error meets the Cramer-Rao bound, the bound is tight and no
better one of its kind exists; where it departs, noise is too large for a local bound to mean much.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lit_recon.bounds.fisher import GaussianRelease
from lit_recon.bounds.two_layer import TwoLayerJacobian, TwoLayerNet
from lit_recon.errors import ConfigError
from lit_recon.records import Update


def likeliest_inputs(
    net: TwoLayerNet, start: Tensor, targets: Tensor, observed: Update, release: GaussianRelease, steps: int = 5
) -> Tensor:
    """Inputs `(n, d)` at which the release is likeliest, by damped Gauss-Newton steps from `start`.

    Args:
        net: the network.
        start: `(n, d)`; the truth, for the question above.
        targets: known.
        observed: update with noise; dropped coordinates are of no account.
        release: noise and mask, without clipping.
        steps: at most; each is halved until the likelihood does not fall.

    Raises:
        ConfigError: a clipped release, or less than one step.
    """
    if steps < 1 or release.bound != float("inf"):
        raise ConfigError(f"Gauss-Newton needs 1 step or more and no clipping; got {steps} and {release.bound:g}")
    weights = release.precision(observed)

    def misfit(inputs: Tensor) -> tuple[Update, float]:
        update = net.update(inputs, targets)
        weighted = {name: weights[name] * (observed[name] - value) for name, value in update.items()}
        return weighted, float(sum((weighted[name] * (observed[name] - update[name])).sum() for name in update))

    inputs, (weighted, value) = start, misfit(start)
    for _ in range(steps):
        jacobian = TwoLayerJacobian(net, inputs, targets)
        step = torch.linalg.lstsq(jacobian.gram(weights), jacobian.transposed(weighted)[:, None]).solution
        length = 1.0
        while length > 1e-3:
            moved = inputs + length * step.view_as(inputs)
            found, less = misfit(moved)
            if less <= value:
                inputs, weighted, value = moved, found, less
                break
            length /= 2
        else:
            break
    return inputs
