"""Input maps and active entries from few observed entries of a convolution's gradient."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lit_recon.attacks.updates.feature_maps.convolutions import Convolution
from lit_recon.attacks.updates.feature_maps.partial_gradient import MapEstimate, PartialFit, PartialGradient

CHANNELS = 48


class Layer:
    """A convolution with a sparse input, the derivative behind it, and its gradient with few observed entries."""

    def __init__(self, stride: int = 1, side: int = 4, observed: float = 0.1) -> None:
        generator = torch.Generator().manual_seed(0)
        out = (side - 1) // stride + 1
        self.layer = Convolution("layer", (32, side, side), CHANNELS, (3, 3), (stride, stride), (1, 1), out**2, True)
        self.maps = torch.randn(32, side, side, generator=generator, dtype=torch.float64).clamp_min(0)
        self.derivative = torch.randn(CHANNELS, out, out, generator=generator, dtype=torch.float64)
        self.active = (torch.rand(self.derivative.shape, generator=generator) < 0.5).double()
        weights = torch.zeros(CHANNELS, 32, 3, 3, dtype=torch.float64, requires_grad=True)
        # the gradient by automatic differentiation, in place of the patches of the code that is tested
        outputs = torch.nn.functional.conv2d(self.maps[None], weights, stride=stride, padding=1)
        (outputs[0] * self.derivative * self.active).sum().backward()
        assert weights.grad is not None
        self.whole = weights.grad
        self.gradient = self.whole * (torch.rand(self.whole.shape, generator=generator) < observed)
        self.noise = torch.randn(self.maps.shape, generator=generator, dtype=torch.float64)
        self.wrong = torch.rand(self.active.shape, generator=generator)

    @property
    def sums(self) -> Tensor:
        return (self.derivative * self.active).sum((1, 2))

    def fit(self, off: float, switched: float, sums: Tensor | None = None) -> PartialFit:
        """From a guess whose maps are `off` and of whose active entries a share is `switched`."""
        active = torch.where(self.wrong < switched, 1 - self.active, self.active)
        guess = (self.maps + off * self.maps.square().mean().sqrt() * self.noise).clamp_min(0)
        return PartialGradient(self.layer, self.gradient).fit(self.derivative, guess, active, sums)


def far(estimate: Tensor, truth: Tensor) -> float:
    return float((estimate - truth).norm() / truth.norm())


def wrong(found: MapEstimate, truth: Tensor) -> float:
    return float(((found.values > 0.5) != (truth > 0.5)).double().mean())


@pytest.mark.parametrize(("stride", "side"), [(1, 4), (2, 8)])
def test_a_tenth_of_the_entries_tells_maps_and_active_entries_from_a_rough_guess(stride: int, side: int) -> None:
    layer = Layer(stride, side, 0.1 if stride == 1 else 0.4)
    found = layer.fit(0.5, 0.15)
    assert 0.2 < found.misfit < 1.5
    assert found.left < 0.1 * found.misfit
    # measured: 0.09 and 0.04, from 0.33 and 0.34; 2 and 0.3 %, from 15
    assert far(found.maps.values, layer.maps) < 0.2
    assert wrong(found.active, layer.active) < 0.06


def test_a_gradient_with_a_rank_that_no_completion_allows_is_solved_to_the_last_digits_from_a_near_guess() -> None:
    layer = Layer()
    # rows and columns have more freedom at the gradient's rank than there are observed entries
    assert int((layer.gradient != 0).sum()) < 16 * (CHANNELS + 9 * 32 - 16)
    found = layer.fit(0.02, 0.0)
    assert far(found.maps.values, layer.maps) < 0.2 * far(layer.fit(0.5, 0.15).maps.values, layer.maps)


def test_variances_are_those_of_the_errors() -> None:
    layer = Layer()
    for off, switched in ((0.5, 0.15), (0.2, 0.05)):
        found = layer.fit(off, switched)
        errors = (found.maps.values - layer.maps).square()
        assert 0.25 < float(errors.mean() / found.maps.variances.mean()) < 4
        # entries that are said to be known are closer than the others
        known = found.maps.variances < found.maps.variances.median()
        assert errors[known].mean() < 0.5 * errors[~known].mean()


def test_known_sums_are_further_equations() -> None:
    layer = Layer(observed=0.05)

    def missed(sums: Tensor) -> float:
        found = layer.fit(0.5, 0.2, sums).active.values
        return far((layer.derivative * found).sum((1, 2)), layer.sums)

    assert missed(layer.sums) < 0.6 * missed(torch.zeros_like(layer.sums))


def test_what_no_entry_tells_stays_at_the_guess() -> None:
    layer = Layer()
    layer.gradient[:, 3] = 0
    found = layer.fit(0.3, 0.1)
    guess = (layer.maps + 0.3 * layer.maps.square().mean().sqrt() * layer.noise).clamp_min(0)
    torch.testing.assert_close(found.maps.values[3], guess[3])
    assert found.maps.variances[3].min() == found.maps.variances.max()


def test_a_gradient_without_observed_entries_tells_nothing() -> None:
    layer = Layer()
    layer.gradient[:] = 0
    found = layer.fit(0.3, 0.0)
    guess = (layer.maps + 0.3 * layer.maps.square().mean().sqrt() * layer.noise).clamp_min(0)
    torch.testing.assert_close(found.maps.values, guess)
    torch.testing.assert_close(found.active.values, layer.active)
    assert (found.misfit, found.left) == (math.inf, math.inf)
    # the same variances as where single channels of the map are hidden
    layer = Layer()
    layer.gradient[:, 3] = 0
    usual = layer.fit(0.3, 0.0)
    assert float(found.maps.variances.min()) > float(usual.maps.variances.median())
    assert float(found.active.variances.min()) >= float(usual.active.variances.max())
