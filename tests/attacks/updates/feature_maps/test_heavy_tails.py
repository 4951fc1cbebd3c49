"""Searches behind noise whose size depends on the images: where they end, when, and by which likelihood."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor, nn

from lit_recon.attacks.updates import MatchingState, PatchMatching
from lit_recon.attacks.updates.feature_maps.heavy_tails import HeavyTails
from lit_recon.attacks.updates.feature_maps.patch_penalty import PatchPenalty
from lit_recon.clients import Client
from lit_recon.defenses import Defense, GaussianNoise, GradientClipping, OptimalGradientNoise
from lit_recon.records import Knowledge, Normalization, Observation, Reconstruction
from tests.attacks.updates.feature_maps.patch_victims import STD, attack, victim


def penalty_of(seen: Observation) -> PatchPenalty:
    penalty = PatchMatching().prepare(seen)
    assert penalty.tails is not None
    return penalty


def error(found: Reconstruction, truth: Tensor) -> float:
    return float((found.images - truth).square().mean().sqrt())


# at most 0.9, 0.32, 0.25 and 0.38 of the error measured
@pytest.mark.slow
@pytest.mark.parametrize(("std", "most"), [(STD, 1.2), (3e-3, 0.6), (0.01, 0.6), (0.03, 0.6)])
def test_images_behind_noise_that_depends_on_them(
    images: Tensor, std: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = []
    for heavy in (True, False):
        if not heavy:
            monkeypatch.setattr(HeavyTails, "of", lambda *given: None)
        result = attack(20)(victim(images[1:], OptimalGradientNoise(std)))
        assert ("heavy tails" in " ".join(result.notes)) == heavy
        assert result.certified is None
        errors.append(error(result, images[1:]))
    assert errors[0] < most * errors[1], errors


def test_rows_around_the_images_reached_lead_closer(images: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = victim(images[1:], OptimalGradientNoise(STD))
    result = attack(20)(seen)
    assert "around the images found the noise is" in result.notes[-1]
    monkeypatch.setattr(PatchPenalty, "renews", lambda *given: False)
    assert error(result, images[1:]) < 0.9 * error(attack(20)(seen), images[1:])


@pytest.mark.slow
def test_rows_are_as_steep_as_the_likelihood_of_the_best_derivatives(images: Tensor) -> None:
    """The residual's slope beside that of -log density of Student's t, at the best derivatives by another solver."""
    seen = victim(images[1:], OptimalGradientNoise(STD))
    penalty, near = penalty_of(seen), images[1:] + 0.002 * torch.randn(images[1:].shape, generator=seeded(1))
    gradient = seen.update[f"{penalty.judged.rows[-1].layer.name}.weight"].flatten(1).double()

    def residual(own: Tensor, by: PatchPenalty) -> Tensor:
        return by.judged.rows[-1].residual(by.judged.patches(own)[-1])

    def likelihood(own: Tensor) -> Tensor:
        patches, total = penalty.judged.patches(own)[-1].double(), torch.zeros((), dtype=torch.float64)
        basis, back = torch.linalg.qr(patches.detach().T)
        for row, scale in zip(gradient, unit(gradient, basis), strict=True):
            best = torch.linalg.solve_triangular(back, fitted(row / scale, basis)[:, None], upper=True)[:, 0]
            total = total + ((row / scale - best @ patches).square() / 2).log1p().sum()
        return total

    theirs = slope(likelihood, near)
    before, after = (
        torch.nn.functional.cosine_similarity(slope(partial(residual, by=one), near), theirs, dim=0)
        for one in (penalty, penalty.renewed(near))
    )
    assert after > 0.998  # 0.9998 and 0.90 measured
    assert before < 0.95


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def slope(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    place = at.clone().requires_grad_()
    return torch.autograd.grad(function(place), place)[0].double().flatten()


def fitted(row: Tensor, basis: Tensor) -> Tensor:
    """The coefficients in an orthonormal basis of largest likelihood, in units of the noise."""

    def loss(given: Any) -> Any:
        coefficients = torch.tensor(given, requires_grad=True)
        likely = (row - basis @ coefficients).square().div(2).log1p().sum()
        [direction] = torch.autograd.grad(likely, coefficients)
        return float(likely.detach()), direction.numpy()

    found = minimize(loss, (basis.T @ row).numpy(), jac=True, method="BFGS", options={"gtol": 1e-8})
    return torch.from_numpy(found.x)


def unit(gradient: Tensor, basis: Tensor) -> Tensor:
    """Scales of the rows: the median of what fits leave, as of Student's t; no row has less than the median of all."""
    scales = torch.full((len(gradient),), float(gradient.abs().median()), dtype=torch.float64)
    for _ in range(4):
        fits = torch.stack([basis @ fitted(row / s, basis) * s for row, s in zip(gradient, scales, strict=True)])
        scales = (gradient - fits).abs().median(1).values * 1.5**0.5
        scales = scales.clamp_min(float(scales.median()))
    return scales


def test_rows_are_taken_anew_once_images_are_near(images: Tensor) -> None:
    penalty = penalty_of(victim(images[1:], OptimalGradientNoise(STD)))
    late, far = penalty.tempered + 0.1, 1e6
    assert not penalty.renews(late, far)
    assert not penalty.renews(0.0, 0.0)
    assert penalty.renews(late, 0.0)
    assert not penalty.renews(late, float("inf"))  # not known
    again = penalty.renewed(images[1:])
    # in the same units, so that a solver's history is of use
    assert again.stds == penalty.stds
    assert again.judged.rows[0].values.shape == penalty.judged.rows[0].values.shape
    # the true images explain these rows better than those of low rank, up to the noise
    before, after = (one.judged.left(images[1:]) * one.judged.squares / one.freedom for one in (penalty, again))
    assert after < before
    assert after == pytest.approx(1.0, abs=0.05)
    normal = PatchMatching().prepare(victim(images[1:], GaussianNoise(STD)))
    assert not normal.renews(late, 0.0)
    assert normal.renewed(images) is normal


def test_a_search_ends_once_rows_around_its_images_change_nothing(images: Tensor) -> None:
    search = attack(40)
    run = search.begin([victim(images[1:], OptimalGradientNoise(STD))])
    assert isinstance(run.state, MatchingState)
    [problem], steps = run.state.problems, 0
    while run.state.active and not (problem.renews and problem.ended(steps / 40)):
        run.advance()
        steps += 1
    assert steps < 40
    assert problem.renews


def test_losses_before_other_rows_do_not_count(images: Tensor) -> None:
    search = attack()
    [problem] = search.init([victim(images[1:], OptimalGradientNoise(STD))]).problems
    problem.best_loss, problem.fell = -5.0, 0.0
    problem.begin(20)
    problem.fell = 0.0
    problem.renew(search.parametrization, progress=0.9)
    assert problem.renews
    for loss in (3.0, 1.0):
        problem.note(
            0,
            {"loss": loss, "finite": 1.0, "lost": 0.0},
            images[1:],
            problem.labels,
            keep=False,
            matches=False,
            trace=False,
        )
    problem.begin(20)
    assert problem.fell == (3.0 - 1.0) / 20


def test_a_search_is_resumed_as_if_it_had_not_been_killed(images: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    search, seen = attack(14), victim(images[1:], OptimalGradientNoise(STD))
    # from the fifth iteration on, which the state has to tell
    monkeypatch.setattr(PatchPenalty, "renews", lambda penalty, progress, fell: 4 <= 14 * progress < 5)
    whole, killed, resumed = (search.init([seen]) for _ in range(3))
    for number in range(14):
        search.advance(whole)
        if number < 6:
            search.advance(killed)
    assert killed.problems[0].renews
    resumed.load_state_dict(killed.state_dict())
    for _ in range(14 - 6):
        search.advance(resumed)
    assert whole.problems[0].renews
    assert torch.equal(search.result(whole)[0].images, search.result(resumed)[0].images)


@pytest.mark.parametrize("defense", [Defense(), GradientClipping(1.0)], ids=str)
@pytest.mark.parametrize("known", [True, False])
def test_small_singular_values_of_exact_gradients_are_no_noise(images: Tensor, defense: Defense, known: bool) -> None:
    """The gradients of all layers have as many directions as channels."""
    torch.manual_seed(0)
    stages = [(3, 32, 1), (32, 32, 2), (32, 32, 1)]
    layers = [part for c, to, stride in stages for part in (nn.Conv2d(c, to, 3, stride, 1), nn.GELU())]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    normalization, labels = Normalization((0.5,) * 3, (0.25,) * 3), torch.arange(2)
    client = Client(model, defense=defense, image_shape=(3, 8, 8), normalization=normalization)
    penalty = PatchMatching().prepare(client.observe(images, labels, Knowledge(defense=known)))
    assert (penalty.noise is None) == known
    certified, final, notes = penalty.certificate(images, labels)
    assert certified is not None
    assert certified.all(), notes
    assert final
    # other images leave more than the noise that was estimated
    certified, _, notes = penalty.certificate(images + 0.05 * torch.randn(images.shape, generator=seeded(0)), labels)
    assert not certified.any() if known else certified is None, notes  # type: ignore[union-attr]
