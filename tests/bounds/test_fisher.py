"""Information of a Gaussian release, bounds from it, and estimators that meet them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from lit_recon.attacks.updates.features.activations import GELU
from lit_recon.bounds import (
    GaussianPrior,
    NoisyRelease,
    TwoLayerJacobian,
    TwoLayerNet,
    autograd_jacobian,
    cramer_rao,
    fisher_information,
    likeliest_inputs,
    unit_norm_cramer_rao,
    van_trees,
)
from lit_recon.bounds.cramer_rao import EVERY_ATTACK, UNBIASED, UNBIASED_ON_SPHERE
from lit_recon.bounds.fisher import DenseJacobian
from lit_recon.clients.gradient import GradientOperator
from lit_recon.errors import ConfigError, ShapeError
from lit_recon.records import Batch, Update, Weights


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_jacobian_of_a_convolutional_clients_update() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2), nn.ELU(), nn.Flatten(), nn.Linear(8, 3)).double()
    weights, images = Weights.of(model), normal(2, 1, 4, 4)
    labels, operator = torch.tensor([0, 2]), GradientOperator(model)

    def update(x: Tensor) -> Update:
        return operator(weights, Batch(x, labels), "functional")

    ours = autograd_jacobian(update, images, chunk=5)
    theirs = torch.func.jacrev(update)(images)
    for name, rows in ours.rows.items():
        assert (rows - theirs[name].reshape(rows.shape)).abs().max() < 1e-10


def test_a_jacobian_that_does_not_fit_is_refused_before_it_is_computed() -> None:
    with pytest.raises(ConfigError, match=r"100 coordinates by 100 inputs .* two-layer"):
        autograd_jacobian(lambda x: {"w": x**2}, torch.ones(100), largest=9_999)
    with pytest.raises(ConfigError, match="at least 1 column"):
        autograd_jacobian(lambda x: {"w": x**2}, torch.ones(1), chunk=0)


def test_rows_must_fit_the_update() -> None:
    with pytest.raises(ShapeError, match="one row per coordinate"):
        DenseJacobian({"w": torch.zeros(3)}, {"w": torch.zeros(2, 5)})


@pytest.mark.parametrize("std", [0.0, -1.0, math.inf, math.nan])
def test_a_release_without_noise_has_no_information_to_speak_of(std: float) -> None:
    with pytest.raises(ConfigError, match="only bound is 0"):
        NoisyRelease(std)
    assert NoisyRelease(family="laplace").with_noise(0.5) == NoisyRelease(0.5)  # a scale of 0 leaves normal noise
    with pytest.raises(ConfigError, match="give it a scale"):
        NoisyRelease().precision({"w": torch.zeros(3)})
    with pytest.raises(ConfigError, match="clipping bound above 0"):
        NoisyRelease(1.0, bound=0.0)


def test_an_example_without_a_gradient_is_released_as_it_is() -> None:
    """Its Jacobian is not zero: the gradients are the inputs themselves, 0 and (3, 4), of which 1 is left."""
    examples = [{"w": torch.tensor(own, dtype=torch.float64)} for own in ([0.0, 0.0], [3.0, 4.0])]
    eye, unit = torch.eye(2, dtype=torch.float64), examples[1]["w"] / 5
    jacobian = DenseJacobian({"w": examples[1]["w"]}, {"w": torch.cat([eye, eye], dim=1)})
    rows = torch.cat([eye, (eye - torch.outer(unit, unit)) / 5], dim=1) / 2
    found = jacobian.after_clipped_examples(examples, bound=1.0).released(NoisyRelease(0.5))
    assert torch.allclose(found.information, rows.T @ rows / 0.25)
    assert torch.allclose(found.update["w"], unit / 2)


def test_noise_of_another_shape_is_refused() -> None:
    with pytest.raises(ShapeError, match="'w'"):
        NoisyRelease({"w": torch.ones(2)}).precision({"w": torch.zeros(3)})
    with pytest.raises(ShapeError, match="'w'"):
        NoisyRelease(1.0, {"v": torch.ones(3)}).precision({"w": torch.zeros(3)})


def test_information_is_that_of_the_laplace_density() -> None:
    """Mean outer product of scores, which PyTorch's density gives for PyTorch's draws and for those of a release."""
    release = NoisyRelease(0.7, family="laplace")
    jacobian = DenseJacobian({"w": normal(6)}, {"w": normal(6, 3, seed=1)})
    generator = torch.Generator().manual_seed(3)
    own = torch.stack([release.drawn(jacobian.update, generator)["w"] for _ in range(4_000)])
    torch.manual_seed(4)
    theirs = torch.distributions.Laplace(jacobian.update["w"], 0.7).sample((4_000,))
    for draws in (own, theirs):
        mean = jacobian.update["w"].repeat(4_000, 1).requires_grad_()
        torch.distributions.Laplace(mean, 0.7).log_prob(draws).sum().backward()
        assert mean.grad is not None
        scores = mean.grad @ jacobian.rows["w"]
        found = fisher_information(jacobian, release)
        assert (scores.T @ scores / len(scores) - found).abs().max() < 0.1 * found.diagonal().max()  # measured 0.04


def test_information_is_that_of_the_gaussian_density() -> None:
    """Expected curvature of the log density, by Monte Carlo of squared scores."""
    jacobian = DenseJacobian({"w": normal(6)}, {"w": normal(6, 3, seed=1)})
    std = {"w": 0.5 + torch.rand(6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)}
    kept = {"w": torch.tensor([True, True, False, True, True, True])}
    release = NoisyRelease(std, kept)
    generator = torch.Generator().manual_seed(3)
    draws = torch.stack([release.drawn(jacobian.update, generator)["w"] for _ in range(4_000)])
    assert (draws[:, 2] == 0).all()
    scores = ((draws - release.mean(jacobian.update)["w"]) * release.precision(jacobian.update)["w"]) @ jacobian.rows[
        "w"
    ]
    found = fisher_information(jacobian, release)
    assert (scores.T @ scores / len(scores) - found).abs().max() < 0.1 * found.diagonal().max()  # measured 0.03


def test_bounds_of_a_known_information() -> None:
    information = torch.diag(torch.tensor([1.0, 4.0, 4.0], dtype=torch.float64))
    bound = cramer_rao(information)
    assert (bound.squared, bound.relaxed, bound.n_inputs) == (1.5, 1.0, 3)
    assert (bound.mse, bound.rmse) == (0.5, math.sqrt(0.5))
    assert "unbiased attacks only" in bound.applies_to
    on_sphere = unit_norm_cramer_rao(information, torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64))
    assert on_sphere.squared == pytest.approx(0.5)
    assert "norm of every input" in on_sphere.applies_to


@pytest.mark.parametrize("seed", range(5))
def test_bounds_come_in_their_order(seed: int) -> None:
    rows = normal(40, 6, seed=seed)
    information, inputs = rows.T @ rows, normal(2, 3, seed=seed + 100)
    free, known = cramer_rao(information), unit_norm_cramer_rao(information, inputs)
    assert free.relaxed <= free.squared
    assert known.squared <= free.squared
    last = math.inf
    for variance in (1e6, 1.0, 1e-2, 1e-6):
        bound = van_trees(information, GaussianPrior.isotropic(3, variance))
        assert bound.relaxed <= bound.squared + 1e-15
        assert bound.squared < min(free.squared, 6 * variance, last)
        assert bound.applies_to == EVERY_ATTACK
        last = bound.squared
    assert van_trees(information, GaussianPrior.isotropic(3, 1e9)).squared == pytest.approx(free.squared, rel=1e-6)
    assert van_trees(0 * information, GaussianPrior.isotropic(3, 0.1)).squared == pytest.approx(0.6)


@pytest.mark.parametrize("std", [0.1, 3.0])
@pytest.mark.parametrize("per_coordinate", [False, True])
def test_errors_bounded_by_the_information_grow_like_the_noise(std: float, per_coordinate: bool) -> None:
    """Least squares from a linear release has the mean squared error `std^2 tr((J^T J)^-1)`, and reaches the bound."""
    rows = normal(8, 3)
    jacobian = DenseJacobian({"w": rows[:, 0]}, {"w": rows})
    noise = {"w": torch.full((8,), std, dtype=torch.float64)} if per_coordinate else std
    bound = cramer_rao(fisher_information(jacobian, NoisyRelease(noise)))
    assert bound.squared == pytest.approx(std**2 * float(torch.linalg.inv(rows.T @ rows).trace()), rel=1e-9)
    errors = std * normal(20_000, 8, seed=1) @ torch.linalg.pinv(rows).T
    assert float(errors.square().sum(dim=1).mean()) == pytest.approx(bound.squared, rel=0.03)  # measured 1.002


def test_a_direction_that_the_release_leaves_open_has_no_bound() -> None:
    information = torch.diag(torch.tensor([1.0, 0.0]))
    assert cramer_rao(information).squared == math.inf
    assert cramer_rao(torch.zeros(2, 2)).relaxed == math.inf
    # an attack that knows the norm along the open direction needs to know no more
    assert unit_norm_cramer_rao(information, torch.tensor([[0.0, 1.0]])).squared == pytest.approx(1.0)
    assert UNBIASED in UNBIASED_ON_SPHERE


def test_rounding_makes_no_bound_too_high() -> None:
    """As in single precision, the errors of small eigenvalues are as large as these, or larger."""
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(40, 40, generator=generator, dtype=torch.float64)).Q
    information = (basis * torch.logspace(-8, 2, 40, dtype=torch.float64)) @ basis.T
    prior = GaussianPrior.isotropic(40, 1e4)  # knows next to nothing
    too_high = 0
    for _ in range(20):
        noise = torch.randn(40, 40, generator=generator, dtype=torch.float64)
        rounded = information + 1e-5 * (noise + noise.T) / 2**0.5
        size = float(torch.linalg.matrix_norm(rounded - information, 2))
        assert cramer_rao(rounded, size).squared <= cramer_rao(information).squared
        assert 0 < van_trees(rounded, prior, size).squared <= van_trees(information, prior).squared
        too_high += not 0 < van_trees(rounded, prior).squared <= van_trees(information, prior).squared
    assert too_high > 10  # all 20
    # what rounding hides counts as told by as much as it allows
    assert cramer_rao(torch.diag(torch.tensor([1e-6, 1.0])), 1e-5).squared == pytest.approx(1 / 1.1e-5 + 1, rel=1e-3)


def test_malformed_information_is_refused() -> None:
    with pytest.raises(ShapeError, match="square"):
        cramer_rao(torch.ones(2, 3))
    with pytest.raises(ShapeError, match="finite"):
        cramer_rao(torch.full((2, 2), math.nan))
    with pytest.raises(ShapeError, match="inputs"):
        unit_norm_cramer_rao(torch.eye(3), torch.ones(1, 2))
    with pytest.raises(ShapeError, match="2 coordinates"):
        van_trees(torch.eye(3), GaussianPrior.isotropic(2, 1.0))


def test_priors_are_checked_and_fitted() -> None:
    samples = normal(500, 2, 2)
    prior = GaussianPrior.fitted(samples, floor=0.1)
    assert torch.allclose(prior.covariance, torch.cov(samples.flatten(1).T) + 0.1 * torch.eye(4))
    with pytest.raises(ConfigError, match="above 0"):
        GaussianPrior.isotropic(2, 0.0)
    with pytest.raises(ConfigError, match="positive definite"):
        GaussianPrior(torch.diag(torch.tensor([1.0, 0.0])))
    with pytest.raises(ShapeError, match="square"):
        GaussianPrior(torch.ones(2, 3))
    with pytest.raises(ShapeError, match="2 samples"):
        GaussianPrior.fitted(samples[:1])
    with pytest.raises(ConfigError, match="floor"):
        GaussianPrior.fitted(samples, floor=0.0)


def test_the_posterior_mean_meets_van_trees_and_beats_cramer_rao() -> None:
    """A linear release of Gaussian inputs: the best biased attack is known, and its error is the bound."""
    rows, noise, variance = normal(8, 4), 1.5, 0.3
    information = rows.T @ rows / noise**2
    gain = torch.linalg.solve(information + torch.eye(4) / variance, rows.T) / noise**2
    generator = torch.Generator().manual_seed(0)
    inputs = math.sqrt(variance) * torch.randn(40_000, 4, generator=generator, dtype=torch.float64)
    seen = inputs @ rows.T + noise * torch.randn(40_000, 8, generator=generator, dtype=torch.float64)
    error = float((seen @ gain.T - inputs).square().sum(dim=1).mean())
    bound = van_trees(information, GaussianPrior.isotropic(4, variance)).squared
    assert error == pytest.approx(bound, rel=0.02)  # measured 1.003
    unbiased = seen @ torch.linalg.pinv(rows).T
    assert float((unbiased - inputs).square().sum(dim=1).mean()) == pytest.approx(
        cramer_rao(information).squared, rel=0.02
    )
    assert error < 0.6 * cramer_rao(information).squared


def test_maximum_likelihood_meets_the_bound() -> None:
    net = TwoLayerNet(normal(400, 6), torch.zeros(400, dtype=torch.float64), normal(1, 400, seed=1) / 400, GELU)
    inputs = nn.functional.normalize(normal(2, 6, seed=2), dim=1)
    targets = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    jacobian = TwoLayerJacobian(net, inputs, targets)
    generator = torch.Generator().manual_seed(0)
    kept = {name: torch.rand(v.shape, generator=generator) > 0.3 for name, v in jacobian.update.items()}
    release = NoisyRelease(0.05, kept)
    errors = []
    for _ in range(120):
        observed = release.drawn(jacobian.update, generator)
        found = likeliest_inputs(net, inputs, targets, observed, release, steps=2)
        errors.append(float((found - inputs).square().sum()))
    bound = cramer_rao(fisher_information(jacobian, release)).squared
    assert sum(errors) / len(errors) == pytest.approx(bound, rel=0.2)  # standard error 0.04 to 0.06


def test_gauss_newton_without_noise_finds_the_truth_from_nearby() -> None:
    net = TwoLayerNet(normal(200, 4), torch.zeros(200, dtype=torch.float64), normal(1, 200, seed=1), GELU)
    inputs, targets = normal(2, 4, seed=2), torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    observed, release = net.update(inputs, targets), NoisyRelease(1.0)
    found = likeliest_inputs(net, inputs + 0.05 * normal(2, 4, seed=3), targets, observed, release, steps=12)
    assert (found - inputs).abs().max() < 1e-9
    assert torch.equal(likeliest_inputs(net, inputs, targets, observed, release, steps=1), inputs)
    for other in (NoisyRelease(1.0, bound=1.0), NoisyRelease(1.0, family="laplace")):
        with pytest.raises(ConfigError, match="no clipping and normal noise"):
            likeliest_inputs(net, inputs, targets, observed, other)
