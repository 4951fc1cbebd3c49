"""Bilevel attacks: derivatives of trained weights in the images, and what descent on them finds on real digits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lit_recon.attacks.shadow.training import unflatten
from lit_recon.attacks.trainset.base import Candidates, ReleasedModel
from lit_recon.attacks.trainset.bilevel import Bilevel, DampedBilevel, ImplicitBilevel, UnrolledBilevel
from lit_recon.attacks.trainset.inner import conjugate_gradients, newton
from lit_recon.attacks.trainset.kkt import Stationarity
from lit_recon.attacks.trainset.training import Task, Training
from lit_recon.data.sources import Digits
from lit_recon.defenses.vectors import flatten
from lit_recon.errors import ConfigError, ThreatModelError, UnsupportedModelError
from lit_recon.models.centered import CenteredMLP
from lit_recon.privacy.noisy_sgd import PrivateDescent

TASKS: tuple[Task, ...] = ("binary", "multiclass", "regression")


def parameter_distance(seen: ReleasedModel, images: Tensor, labels: Tensor, attack: Bilevel, seed: int = 0) -> float:
    """Relative distance of the released weights from those that training on these images gives.

    The images may be any `(m, c, h, w)`, such as mixtures of true images and noise; `seed` is that of the start that is
    drawn if the true one is not known. Errors are those of the attack's `check`.
    """
    start = Candidates(seen, images, labels, seed)
    attack.check(start)
    problem = attack.problem(start)
    with torch.no_grad():
        vector = attack.trained(problem, images.to(start.like), problem.origin)
    return problem.distance(vector)


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor]:
    """100 real digits of the classes 0 to 2 in float64, and their labels."""
    train, _ = Digits().read()
    chosen = torch.nonzero(train.labels < 3).flatten()[:100]
    return train.images[chosen].double() / 255, train.labels[chosen]


def released(
    digits: tuple[Tensor, Tensor],
    task: Task,
    n: int = 6,
    hidden: tuple[int, ...] = (),
    training: Training | None = None,
) -> tuple[ReleasedModel, Tensor, Tensor]:
    """A trained network with its training images and labels; without `training` trained until convergence."""
    images, labels = digits[0][:n], digits[1][:n] if task == "multiclass" else (digits[1][:n] > 0).long()
    k, mean = (3 if task == "multiclass" else 1), digits[0][50:].mean(dim=0)
    network = CenteredMLP((1, 8, 8), k, hidden, initial_std=None, mean=mean).double()
    network.initialize(torch.Generator().manual_seed(1))
    start = {name: weight.detach().clone() for name, weight in network.named_parameters()}
    seen = ReleasedModel(
        network, start, task, (1, 8, 8), max(k, 2), mean, n, 0.01 if training is None else training.weight_decay
    )
    if training is not None:
        trained = training.run(network, images, labels, start).weights
        return replace(seen, weights=trained, training=training, start=start), images, labels
    problem = ImplicitBilevel().problem(Candidates(seen, images, labels))
    return replace(seen, weights=unflatten(seen.model, newton(problem, images, problem.origin))), images, labels


def noise(images: Tensor, seed: int = 0) -> Tensor:
    return torch.rand(images.shape, generator=torch.Generator().manual_seed(seed)).to(images)


def gradient_of(attack: Bilevel, start: Candidates) -> Tensor:
    problem = attack.problem(start)
    return attack.descent(problem, start.images, problem.origin)[1]


def test_conjugate_gradients_solve_a_system_and_stop_at_negative_curvature() -> None:
    factor = torch.randn(12, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    matrix, right = factor @ factor.T + torch.eye(12), torch.arange(12.0, dtype=torch.float64)
    torch.testing.assert_close(
        conjugate_gradients(lambda v: matrix @ v, right), torch.linalg.solve(matrix, right), rtol=1e-8, atol=1e-8
    )
    saddle = torch.tensor([1.0, -1.0], dtype=torch.float64)
    right = torch.tensor([1.0, 0.1], dtype=torch.float64)
    found = conjugate_gradients(lambda v: saddle * v, right, most=50)
    torch.testing.assert_close(found, right * 1.01 / 0.99)  # the first step, and none in the second direction


def test_newton_finds_the_solutions_of_another_library(digits: tuple[Tensor, Tensor]) -> None:
    from sklearn.linear_model import LogisticRegression, Ridge

    for task in TASKS:
        seen, images, labels = released(digits, task, n=30)
        inputs = (images - seen.mean).flatten(1)
        with_bias = torch.cat([inputs, torch.ones(30, 1, dtype=torch.float64)], dim=1).numpy()
        if task == "regression":  # squared error without a factor of one half
            reference = Ridge(alpha=0.01 * 30 / 2, fit_intercept=False, tol=1e-14).fit(
                with_bias, labels.numpy() * 2 - 1
            )
        else:
            reference = LogisticRegression(
                C=1 / (0.01 * 30), fit_intercept=False, solver="newton-cholesky", tol=1e-13, max_iter=500
            ).fit(with_bias, labels.numpy())
        wanted = torch.from_numpy(reference.coef_).reshape(-1, 65)
        weight, bias = (value.detach() for value in seen.weights.values())
        found = torch.cat([weight, bias[:, None]], dim=1)
        assert (found - wanted).norm() < 1e-9 * wanted.norm(), task  # measured below 4e-13


@pytest.mark.parametrize("task", TASKS)
def test_implicit_gradients_are_those_of_finite_differences(digits: tuple[Tensor, Tensor], task: Task) -> None:
    seen, images, labels = released(digits, task)
    attack, start = ImplicitBilevel(tolerance=1e-12), Candidates(seen, noise(images), labels)
    gradient, problem = gradient_of(attack, start), attack.problem(start)
    generator = torch.Generator().manual_seed(2)
    for _ in range(3):
        along = torch.randn(images.shape, generator=generator, dtype=torch.float64)
        high, low = (
            float(attack.objective(problem, attack.trained(problem, start.images + size * along, problem.origin)))
            for size in (5e-5, -5e-5)
        )
        expected = float((gradient * along).sum())
        assert (high - low) / 1e-4 == pytest.approx(expected, rel=1e-6)  # measured below 2e-7


@pytest.mark.parametrize("task", TASKS)
def test_unrolled_and_implicit_gradients_agree_where_training_converges(
    digits: tuple[Tensor, Tensor], task: Task
) -> None:
    seen, images, labels = released(digits, task)
    seen = replace(seen, weight_decay=0.1)
    training = Training(task, steps=200, lr=0.1, momentum=0.8, weight_decay=0.1)
    start = Candidates(replace(seen, training=training), noise(images), labels)
    implicit, unrolled = ImplicitBilevel(), UnrolledBilevel()
    expected, found = gradient_of(implicit, start), gradient_of(unrolled, start)
    # The unrolled attack counts changes from its start: the same objective up to a factor.
    ratio = implicit.problem(start).released.square().sum()
    problem = unrolled.problem(start)
    expected = expected * ratio / (problem.released - problem.origin).square().sum()
    assert (found - expected).norm() < 1e-5 * expected.norm()  # measured 1e-7


def test_at_the_truth_the_distance_is_zero(digits: tuple[Tensor, Tensor]) -> None:
    for task in TASKS:
        seen, images, labels = released(digits, task)
        assert parameter_distance(seen, images, labels, ImplicitBilevel()) < 1e-8, task
        assert parameter_distance(seen, noise(images), labels, ImplicitBilevel()) > 0.1, task
        assert float(gradient_of(ImplicitBilevel(), Candidates(seen, images, labels)).norm()) < 1e-8, task
        training = Training(task, steps=20, lr=0.2, momentum=0.5, weight_decay=0.01)
        seen, images, labels = released(digits, task, hidden=(10,), training=training)
        assert parameter_distance(seen, images, labels, UnrolledBilevel()) < 1e-12, task
        assert parameter_distance(seen, images, labels, DampedBilevel()) < 1e-12, task
        assert parameter_distance(seen, noise(images), labels, UnrolledBilevel()) > 0.1, task


def test_a_training_that_ends_at_a_loss_is_simulated_to_the_same_step(digits: tuple[Tensor, Tensor]) -> None:
    for training in (
        Training("binary", steps=100, lr=0.1, until=0.3),
        Training("binary", steps=60, lr=0.1, objective="log_loss", until=0.05),
    ):
        seen, images, labels = released(digits, "binary", hidden=(10,), training=training)
        assert parameter_distance(seen, images, labels, UnrolledBilevel()) < 1e-12
        without = replace(seen, training=replace(training, until=0.0))
        assert parameter_distance(without, images, labels, UnrolledBilevel()) > 0.01


def test_a_training_in_parts_is_simulated_with_its_parts(digits: tuple[Tensor, Tensor]) -> None:
    training = Training("binary", steps=20, lr=0.2, weight_decay=0.01, parts=2)
    seen, images, labels = released(digits, "binary", hidden=(10,), training=training)
    for attack in (UnrolledBilevel(), UnrolledBilevel(steps_inner=20)):
        assert parameter_distance(seen, images, labels, attack) < 1e-12
    known = replace(seen, known_images=images[:3], known_labels=labels[:3])
    assert parameter_distance(known, images[3:], labels[3:], UnrolledBilevel()) < 1e-12
    with pytest.raises(ThreatModelError, match="got 20 steps and 12 candidates: give 6"):
        parameter_distance(seen, images.repeat(2, 1, 1, 1), labels.repeat(2), UnrolledBilevel())
    with pytest.raises(ThreatModelError, match="got 1 steps and 6 candidates: .* at least 2"):
        parameter_distance(seen, images, labels, UnrolledBilevel(steps_inner=1))
    seen, images, labels = released(digits, "binary", training=training)
    for one in (DampedBilevel(), ImplicitBilevel()):
        with pytest.raises(ThreatModelError, match=f"{type(one).__name__} takes .* from the last part alone"):
            one.begin([Candidates(seen, images, labels)])


@pytest.mark.parametrize("multiplier", [0.0, 1.0])
def test_a_training_with_dp_is_not_simulated_without_it(digits: tuple[Tensor, Tensor], multiplier: float) -> None:
    training = Training("binary", steps=5, lr=0.1, weight_decay=0.01)
    seen, images, labels = released(digits, "binary", training=training)
    private = replace(training, dp=PrivateDescent(noise_multiplier=multiplier))
    for attack in (UnrolledBilevel(), DampedBilevel(), ImplicitBilevel()):
        with pytest.raises(ThreatModelError, match="a training with dp cannot be simulated"):
            attack.begin([Candidates(replace(seen, training=private), images, labels)])


def test_checkpoints_change_no_gradient(digits: tuple[Tensor, Tensor]) -> None:
    training = Training("binary", steps=23, lr=0.1, momentum=0.9, weight_decay=0.01)
    seen, images, labels = released(digits, "binary", hidden=(10,), training=training)
    start = Candidates(seen, noise(images), labels)
    plain = gradient_of(UnrolledBilevel(segment=23), start)
    for segment in (1, 5, None):
        torch.testing.assert_close(gradient_of(UnrolledBilevel(segment=segment), start), plain, rtol=1e-10, atol=1e-14)


def test_unrolled_gradients_are_those_of_finite_differences(digits: tuple[Tensor, Tensor]) -> None:
    training = Training("multiclass", steps=15, lr=0.1, momentum=0.9, weight_decay=0.01)
    seen, images, labels = released(digits, "multiclass", hidden=(10,), training=training)
    start = Candidates(seen, noise(images), labels)
    along = torch.randn(images.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for attack in (UnrolledBilevel(), UnrolledBilevel(distance="cosine")):
        problem, expected = attack.problem(start), float((gradient_of(attack, start) * along).sum())
        high, low = (
            float(attack.objective(problem, attack.trained(problem, start.images + size * along, problem.origin)))
            for size in (1e-5, -1e-5)
        )
        assert (high - low) / 2e-5 == pytest.approx(expected, rel=1e-5)


def test_damped_and_implicit_gradients_agree_on_a_convex_problem(digits: tuple[Tensor, Tensor]) -> None:
    seen, images, labels = released(digits, "binary")
    training = Training("binary", steps=250, lr=0.1, momentum=0.8, weight_decay=0.1)
    start = Candidates(replace(seen, training=training, weight_decay=0.1), noise(images), labels)
    expected = gradient_of(ImplicitBilevel(), start)
    close = gradient_of(DampedBilevel(damping=1e-9), start)
    far = gradient_of(DampedBilevel(damping=1.0), start)
    assert torch.cosine_similarity(close.flatten(), expected.flatten(), dim=0) > 1 - 1e-6
    assert torch.cosine_similarity(far.flatten(), expected.flatten(), dim=0) < 0.999


def test_an_unknown_start_is_drawn_from_the_seed(digits: tuple[Tensor, Tensor]) -> None:
    training = Training("binary", steps=10, lr=0.1)
    seen, images, labels = released(digits, "binary", hidden=(10,), training=training)
    seen, attack = replace(seen, start=None), UnrolledBilevel()
    first, again, other = (attack.origin(Candidates(seen, images, labels, seed)) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.std() == pytest.approx(float(flatten(seen.weights).std()), rel=0.3)
    assert parameter_distance(seen, images, labels, attack) > 0.1


@pytest.mark.parametrize(
    ("attack", "training", "left"),  # left: share of the distance, with a margin over the measured one
    [
        (ImplicitBilevel(steps=20, lr=0.1), None, 0.4),  # measured 0.24
        (UnrolledBilevel(steps=20, lr=0.1), Training("binary", steps=15, lr=0.2, momentum=0.8), 0.8),  # measured 0.63
        (
            UnrolledBilevel(steps=20, lr=0.1, distance="cosine"),
            Training("binary", steps=15, lr=0.2, momentum=0.8),
            0.5,
        ),  # measured 0.37
        (
            DampedBilevel(steps=20, lr=0.1),
            Training("binary", steps=120, lr=0.2, momentum=0.8, weight_decay=0.05),
            0.85,  # measured 0.71
        ),
    ],
)
def test_a_short_attack_brings_the_weights_closer(
    digits: tuple[Tensor, Tensor], attack: Bilevel, training: Training | None, left: float
) -> None:
    seen, images, labels = released(digits, "binary", hidden=(10,) if training else (), training=training)
    start = Candidates(seen, noise(images), labels)
    run = attack.begin([start])
    [found] = run.finish()
    assert run.state is not None
    [[curve]] = run.state.curves
    distance = parameter_distance(seen, found.images, labels, attack)
    assert distance < left * curve["distance"][0]
    assert curve["residual"][-1] < curve["residual"][0]
    if isinstance(attack, UnrolledBilevel) and attack.distance == "cosine":
        assert found.loss == pytest.approx(min(curve["loss"]), rel=1e-6)  # what was minimized
    else:
        assert found.loss == pytest.approx(min(curve["distance"]), rel=1e-6)
        assert found.loss == pytest.approx(distance, rel=0.5)


def test_from_the_truth_an_attack_returns_the_truth(digits: tuple[Tensor, Tensor]) -> None:
    seen, images, labels = released(digits, "multiclass")
    found = ImplicitBilevel(steps=5)(Candidates(seen, images, labels))
    assert (found.images - images).abs().max() < 1e-6
    assert found.loss < 1e-8


def test_one_image_of_an_affine_network_is_recovered(digits: tuple[Tensor, Tensor]) -> None:
    seen, images, labels = released(digits, "binary", n=1)
    found = ImplicitBilevel(steps=60, lr=0.15)(Candidates(seen, noise(images), labels))
    rmse = float((found.images - images).square().mean().sqrt())
    # Measured 0.006.
    assert rmse < 0.05 < 0.3 < float((noise(images) - images).square().mean().sqrt())


def test_an_interrupted_attack_goes_on_where_it_was(digits: tuple[Tensor, Tensor]) -> None:
    training = Training("binary", steps=10, lr=0.2, momentum=0.8, weight_decay=0.02)
    seen, images, labels = released(digits, "binary", hidden=(10,), training=training)
    start = Candidates(replace(seen, start=None), noise(images), labels, seed=3)
    for attack in (UnrolledBilevel(steps=6), DampedBilevel(steps=6)):
        whole = attack(start)
        first = attack.begin([start])
        for _ in range(3):
            first.advance()
        second = attack.begin([start])
        assert first.state is not None
        assert second.state is not None
        second.state.load_state_dict(first.state.state_dict())
        [found] = second.finish()
        assert torch.equal(found.images, whole.images)
        assert found.loss == whole.loss


def test_what_an_attack_needs_to_know_is_asked_for(digits: tuple[Tensor, Tensor]) -> None:
    training = Training("binary", steps=5, lr=0.1)
    seen, images, labels = released(digits, "binary", hidden=(4,), training=training)

    def begin(attack: Bilevel, **changes: object) -> None:
        attack.begin([Candidates(replace(seen, **changes), images, labels)])  # type: ignore[arg-type]

    with pytest.raises(UnsupportedModelError, match="linear in its weights"):
        begin(ImplicitBilevel(), training=replace(training, weight_decay=0.1), weight_decay=None)
    for attack in (ImplicitBilevel(), DampedBilevel()):
        with pytest.raises(ThreatModelError, match=r"weight decay .* it is 0"):
            begin(attack)
        with pytest.raises(ThreatModelError, match=r"weight decay .* it is unknown"):
            begin(attack, weight_decay=None, training=None)
    for attack in (UnrolledBilevel(), DampedBilevel()):
        with pytest.raises(ThreatModelError, match="learning rate"):
            begin(attack, training=None, weight_decay=0.1)
    with pytest.raises(ThreatModelError, match="did not change"):
        begin(UnrolledBilevel(), start=seen.weights)
    far = replace(seen, training=replace(training, task="regression", lr=1e3, steps=200))
    with pytest.raises(ConfigError, match="diverged"):
        UnrolledBilevel(steps=1)(Candidates(far, images, labels))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: ImplicitBilevel(steps=0),
        lambda: ImplicitBilevel(lr=0.0),
        lambda: ImplicitBilevel(tolerance=0.0),
        lambda: UnrolledBilevel(steps_inner=0),
        lambda: UnrolledBilevel(segment=0),
        lambda: UnrolledBilevel(distance="angle"),  # type: ignore[arg-type]
        lambda: DampedBilevel(damping=-1.0),
        lambda: DampedBilevel(steps_warm=0),
        lambda: DampedBilevel(cg_steps=0),
    ],
)
def test_settings_out_of_range_are_refused(wrong: Callable[[], Bilevel]) -> None:
    with pytest.raises(ConfigError, match="got"):
        wrong()


def test_the_order_of_the_weights_in_a_file_does_not_matter(digits: tuple[Tensor, Tensor]) -> None:
    seen, images, labels = released(digits, "binary", hidden=(4,), training=Training("binary", steps=5, lr=0.1))
    assert seen.start is not None
    turned = replace(seen, start=dict(reversed(seen.start.items())))
    expected = parameter_distance(seen, noise(images), labels, UnrolledBilevel())
    assert parameter_distance(turned, noise(images), labels, UnrolledBilevel()) == expected


def test_networks_with_frozen_weights_are_refused(digits: tuple[Tensor, Tensor]) -> None:
    seen, _, _ = released(digits, "binary", hidden=(4,), training=Training("binary", steps=5, lr=0.1))
    frozen = copy.deepcopy(seen.model)
    next(frozen.parameters()).requires_grad_(False)
    with pytest.raises(UnsupportedModelError, match=r"all trained; got requires_grad=False for \['layers.1.weight'\]"):
        replace(seen, model=frozen)


def test_the_weight_decay_is_that_of_a_known_training(digits: tuple[Tensor, Tensor]) -> None:
    training = Training("binary", steps=5, lr=0.1, weight_decay=0.1)
    seen, images, labels = released(digits, "binary", hidden=(), training=training)
    alone = replace(seen, weight_decay=None)
    assert alone.weight_decay == 0.1
    with pytest.raises(ThreatModelError, match=r"that of the training, 0.1; got 0.01: leave it out"):
        replace(seen, weight_decay=0.01)
    Stationarity().check(Candidates(alone, images, labels))
