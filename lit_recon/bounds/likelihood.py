"""Maximum likelihood for a two-layer network's update with Gaussian noise, by Gauss-Newton.

It starts at the true inputs, so that it is a check of the Cramer-Rao bound and not an attack. Where its error equals
the bound, the bound is tight; where it does not, the noise is too large for a local bound to be useful.
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
    """Inputs `(n, d)` that maximize the likelihood of the release, by damped Gauss-Newton steps from `start`.

    Args:
        net: the network.
        start: `(n, d)`; the true inputs, for a check of the bound.
        targets: known.
        observed: update with noise; dropped coordinates are not used.
        release: noise and mask, without clipping.
        steps: largest number of steps; each is halved until the likelihood does not decrease.

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
