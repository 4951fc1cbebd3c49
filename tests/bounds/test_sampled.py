"""Some rows of a Jacobian beside all of them: never more information, and the same rank where they suffice."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lit_recon.bounds import (
    GaussianPrior,
    NetworkJacobian,
    NoisyRelease,
    SampledJacobian,
    remaining,
    unknown_basis,
    unknown_directions,
    van_trees,
)
from lit_recon.clients.gradient import GradientOperator
from lit_recon.defenses import DPSGD, Chain, Defense, GradientClipping, GradientDropout, GradientPruning, Round
from lit_recon.errors import ConfigError
from lit_recon.records import Batch, Update, Weights

LABEL = torch.tensor([1])


def image(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.rand(1, 1, 6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def network(channels: int = 8) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(1, channels, 3, padding=1), nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU()
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(36 * channels, 4)).double()


def gradient(model: nn.Module, pixels: Tensor) -> Update:
    weights = dict(model.named_parameters())

    def loss(parameters: Update) -> Tensor:
        return cross_entropy(torch.func.functional_call(model, parameters, (pixels,)), LABEL)

    found: Update = torch.func.grad(loss)(weights)
    return found


def dense(model: nn.Module) -> tuple[Tensor, Tensor]:
    """The gradient `(p,)` and its Jacobian `(p, q)` by `torch.func.jacrev`."""

    def flat(pixels: Tensor) -> Tensor:
        return torch.cat([value.flatten() for value in gradient(model, pixels).values()])

    return flat(image()).detach(), torch.func.jacrev(flat)(image()).flatten(1).detach()


def released(model: nn.Module, defense: Defense, jacobian: NetworkJacobian | SampledJacobian) -> Tensor:
    round_ = Round(Batch(image(), LABEL), partial(GradientOperator(model), Weights.of(model)))
    return defense.released_information(jacobian, round_, 1.0, torch.Generator().manual_seed(0)).information


def of(model: nn.Module) -> NetworkJacobian:
    return NetworkJacobian(model, Weights.of(model), Batch(image(), LABEL))


def test_rows_are_those_of_the_stored_jacobian() -> None:
    model = network()
    names = ("2.weight", "0.bias")
    rows, error = of(model).rows(names)
    jacobian = dense(model)[1]
    assert torch.allclose(rows, torch.cat([jacobian[72:80], jacobian[80 : 80 + 576]]), atol=1e-14)
    assert error == 0
    single = network().float()
    rough, error = NetworkJacobian(single, Weights.of(single), Batch(image(torch.float32), LABEL)).rows(names)
    actual = float((rough - rows).norm() / rows.norm())
    assert 0.3 * actual < error < 3 * actual  # measured 1.0


@pytest.mark.parametrize("drawn", [1.5, 100.0])
@pytest.mark.parametrize(
    "defense",
    [Defense(), GradientClipping(0.1), GradientClipping(1e9), GradientDropout(0.5), GradientPruning(0.7)],
    ids=["none", "clipping", "no clipping", "dropout", "pruning"],
)
def test_some_entries_have_no_more_information_than_all(defense: Defense, drawn: float) -> None:
    model = network()
    sampled = SampledJacobian(of(model), stored=10, drawn=drawn)
    some, everything = released(model, defense, sampled), released(model, defense, of(model))
    difference = torch.linalg.eigvalsh(everything - some)
    assert difference[0] > -1e-12 * difference[-1]
    assert 0 < some.trace() < everything.trace()


@pytest.mark.parametrize("rate", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("kind", [GradientDropout, GradientPruning])
def test_the_rank_is_that_of_the_rows_that_are_kept(kind: type[GradientDropout | GradientPruning], rate: float) -> None:
    model, defense = network(), kind(rate)
    sampled = SampledJacobian(of(model), stored=1e9, drawn=1e9)
    jacobian = dense(model)[1]
    round_ = Round(Batch(image(), LABEL), partial(GradientOperator(model), Weights.of(model)))
    sent = defense.transform_update(sampled.update, round_, torch.Generator().manual_seed(0))
    kept = torch.cat([value.flatten() for value in sent.values()]) != 0
    expected = 36 - int(torch.linalg.matrix_rank(jacobian[kept]))
    information = released(model, defense, sampled)
    assert unknown_directions(information, sampled.rounding(information)) == expected
    assert expected == 0


def test_directions_that_nothing_tells_are_unknown() -> None:
    model = network(2)
    values, jacobian = dense(model)
    defense = GradientPruning(0.97)
    kept = values.abs() >= values.abs().sort().values[round(0.97 * len(values))]
    expected = 36 - int(torch.linalg.matrix_rank(jacobian[kept]))
    sampled = SampledJacobian(of(model), stored=1e9)
    for one in (sampled, of(model)):
        information = released(model, defense, one)
        unknown = unknown_basis(information, sampled.rounding(information))
        assert unknown.shape[1] == unknown_directions(information) == expected > 0
        assert (jacobian[kept] @ unknown).norm() < 1e-10 * jacobian.norm()


def test_an_update_that_holds_nothing_leaves_every_direction_unknown() -> None:
    """No neuron is active: all rows are zero, and so is their rounding error."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 400, dtype=torch.float64), nn.ReLU(), nn.Linear(400, 3).double())
    torch.nn.init.constant_(model[1].bias, -100.0)
    pixels = torch.rand(1, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    jacobian = SampledJacobian(NetworkJacobian(model, Weights.of(model), Batch(pixels, torch.tensor([1]))))
    information = jacobian.information(NoisyRelease(1.0))
    assert jacobian.rounding(information) == 0
    assert unknown_directions(information, jacobian.rounding(information)) == 64


def test_clipping_hides_the_direction_that_changes_the_length_alone() -> None:
    # a linear network with the squared loss of a target of zero: the gradient of its first layer grows with the image
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3, bias=False)).double()
    jacobian = NetworkJacobian(
        model, Weights.of(model), Batch(image(), LABEL), lambda logits, _: logits.square().sum() / 2
    )
    sampled = SampledJacobian(jacobian, drawn=1e9)
    direction = image().flatten()
    for defense, expected in ((GradientClipping(1e9), 0), (GradientClipping(1e-3), 1)):
        information = released(model, defense, sampled)
        unknown = unknown_basis(information, sampled.rounding(information))
        assert unknown.shape[1] == expected
        if expected:
            assert abs(unknown[:, 0] @ direction) == pytest.approx(float(direction.norm()))


def test_rounding_of_rows_is_not_taken_for_information() -> None:
    sampled = SampledJacobian(of(network()))
    rows = torch.diag(torch.tensor([1.0, 1e-3, 1e-6], dtype=torch.float64))
    for error, expected in ((1e-8, 0), (1e-4, 1), (1e-2, 2)):
        sampled._error = error
        assert unknown_directions(rows.square(), sampled.rounding(rows.square())) == expected


def test_what_remains_is_the_limit_of_little_noise() -> None:
    torch.manual_seed(0)
    information = torch.randn(6, 4, dtype=torch.float64) @ torch.randn(4, 6, dtype=torch.float64)
    information = information @ information.T
    factor = torch.randn(3, 3, dtype=torch.float64)
    prior = GaussianPrior(factor @ factor.T + torch.eye(3, dtype=torch.float64))
    left = remaining(unknown_basis(information), prior)
    limit = van_trees(1e6 * information, prior)
    assert left.squared == pytest.approx(limit.squared, rel=1e-4)
    assert 0 < left.relaxed <= left.squared
    assert left.n_inputs == 6
    nothing = remaining(unknown_basis(torch.eye(6)), prior)
    assert [nothing.squared, nothing.relaxed, nothing.n_inputs] == [0, 0, 6]


def test_masks_behind_a_clip_are_one_release() -> None:
    """A chain of clipping and masks bounds the information by some entries, as each of them does."""
    model = network()
    chain = Chain([GradientClipping(0.1), GradientDropout(0.3), GradientPruning(0.4)])
    some, every = (released(model, chain, one) for one in (SampledJacobian(of(model), 1e9, 1e9), of(model)))
    # of all entries that are kept; the clip's projection on these alone leaves at most as much
    difference = torch.linalg.eigvalsh(every - some)
    assert difference[0] > -1e-10 * float(every.trace())
    assert float(some.trace()) > 0.9 * float(every.trace())


def test_what_some_entries_cannot_tell_is_refused() -> None:
    model = network()
    sampled = SampledJacobian(of(model))
    with pytest.raises(ConfigError, match="one size alone"):
        sampled.released(NoisyRelease({name: torch.ones_like(value) for name, value in sampled.update.items()}))
    with pytest.raises(ConfigError, match="product with all"):
        released(model, DPSGD(0.1, 1.0), sampled)
    with pytest.raises(ConfigError, match="weights of all"):
        sampled.gram()
    with pytest.raises(ConfigError, match="weights of all"):
        released(model, Chain([GradientDropout(0.5), GradientClipping(0.1)]), sampled)
    assert math.isfinite(sampled.released(NoisyRelease(2.0)).information.trace())
