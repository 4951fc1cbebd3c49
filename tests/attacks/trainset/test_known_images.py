"""Known training images: every attack completes them to the training set, at which the truth is a minimum."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lit_recon.attacks.trainset import (
    Candidates,
    DampedBilevel,
    ImplicitBilevel,
    InactiveNeurons,
    KnownStart,
    MarginKKT,
    ReleasedModel,
    Stationarity,
    Training,
    UnrolledBilevel,
)
from lit_recon.attacks.trainset.bilevel import Bilevel
from lit_recon.attacks.trainset.known_start import duality_residual, solve_duals
from lit_recon.errors import ConfigError, ShapeError, ThreatModelError
from lit_recon.models.centered import CenteredMLP
from tests.attacks.trainset.test_bilevel import parameter_distance
from tests.attacks.trainset.test_inactive import LOGISTIC, digits, labels_for, noise
from tests.attacks.trainset.test_inactive import victim as victim_of_digits

SHAPE = (1, 4, 4)
#: Training images that are known, and those that are not.
KNOWN, UNKNOWN = [0, 1, 3, 4], [2, 5]


def victim(training: Training) -> tuple[ReleasedModel, Tensor, Tensor]:
    """An affine model of 6 random images, 4 of them known, and all images and labels."""
    images = torch.rand(6, *SHAPE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = torch.tensor([0, 0, 0, 1, 1, 1])
    model = CenteredMLP(SHAPE, 1, (), initial_std=None).double()
    model.initialize(torch.Generator().manual_seed(1))
    start = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    weights = training.run(model, images, labels, start).weights
    seen = ReleasedModel(
        model,
        weights,
        training.task,
        SHAPE,
        2,
        torch.zeros(SHAPE).double(),
        6,
        weight_decay=training.weight_decay,
        training=training,
        start=start,
        known_images=images[KNOWN],
        known_labels=labels[KNOWN],
    )
    return seen, images, labels


def converged() -> tuple[ReleasedModel, Tensor, Tensor]:
    """Trained with weight decay until convergence."""
    return victim(Training(steps=150, lr=0.5, momentum=0.8, weight_decay=0.1))


def unknown(seen: ReleasedModel, images: Tensor, labels: Tensor, copies: int = 1) -> Candidates:
    """The true unknown images, each as often."""
    return Candidates(seen, images[UNKNOWN].repeat(copies, 1, 1, 1), labels[UNKNOWN].repeat(copies))


@pytest.mark.parametrize("attack", [UnrolledBilevel(), ImplicitBilevel(), DampedBilevel()])
@pytest.mark.parametrize("copies", [2])
def test_bilevel_attacks_train_on_known_images_too(attack: Bilevel, copies: int) -> None:
    seen, images, labels = converged()
    start = unknown(seen, images, labels, copies)
    assert parameter_distance(seen, start.images, start.labels, attack) < 1e-6  # measured 5e-8
    problem = attack.problem(start)
    assert float(problem.gradient(problem.released, start.images).norm()) < 1e-6
    none = replace(seen, known_images=None, known_labels=None)
    assert parameter_distance(none, start.images, start.labels, attack) > 0.5  # measured 0.8


def test_a_short_bilevel_attack_finds_the_unknown_images() -> None:
    seen, images, labels = converged()
    noise = torch.rand(2, *SHAPE, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = ImplicitBilevel(steps=30, lr=0.1)(Candidates(seen, noise, labels[UNKNOWN]))
    assert found.images.shape == (2, *SHAPE)
    assert found.loss < 0.37  # half of that at the start
    assert float((found.images - images[UNKNOWN]).norm()) < float((noise - images[UNKNOWN]).norm())


@pytest.mark.parametrize("copies", [1, 2])
def test_the_gradient_vanishes_at_the_truth(copies: int) -> None:
    seen, images, labels = converged()
    attack = Stationarity(steps=1, lr=1e-9)
    assert attack.result(attack.init(unknown(seen, images, labels, copies))).loss < 1e-11
    none = replace(seen, known_images=None, known_labels=None)
    assert attack.result(attack.init(unknown(none, images, labels, copies))).loss > 1  # measured 1.7


def test_known_images_have_multipliers_in_the_margins_condition() -> None:
    seen, images, labels = converged()
    order = [*KNOWN, *UNKNOWN]
    attack = MarginKKT(min_multiplier=0.0)
    start = unknown(seen, images, labels)
    attack.check(start)
    state = attack.init(start)
    assert state["multipliers"].shape == (6,)
    theta = torch.cat([weight.flatten() for weight in seen.weights.values()])
    signed = (labels[order] * 2 - 1)[:, None] * torch.cat([images[order].flatten(1), torch.ones(6, 1)], dim=1)
    state["multipliers"].data.copy_(6 * torch.linalg.lstsq(signed.T, theta[:, None]).solution[:, 0])
    found = attack.result(state)
    assert found.loss < 1e-12
    assert found.images.shape == (2, *SHAPE)
    torch.testing.assert_close(found.images, images[UNKNOWN])
    with pytest.raises(ShapeError, match="6 training images, 4 of them known, which 1 candidates cannot"):
        attack.check(Candidates(seen, images[:1], labels[:1]))


def test_known_images_explain_a_part_of_the_change() -> None:
    seen, images, labels = victim(Training(steps=1, lr=0.1))
    start = unknown(seen, images, labels)
    attack = KnownStart(steps=2)
    state = attack.init(start)
    assert state["duals"].shape == (2, 6, 1)
    found = attack.result(state)
    assert found.loss < 1e-12
    assert torch.equal(found.labels, labels[UNKNOWN])
    alone = solve_duals(seen, start.images)
    assert float(duality_residual(seen, start.images, alone)) > 0.01
    attack.step(state)
    assert state.curves[0][0]["residual"][0] < 1e-12
    assert state["images"].shape == (2, *SHAPE)


@pytest.mark.parametrize("attack", [UnrolledBilevel(), ImplicitBilevel(), DampedBilevel(), Stationarity()])
@pytest.mark.parametrize("m", [1, 3])
def test_shares_of_known_images_that_cannot_be_right_are_refused(attack: Any, m: int) -> None:
    seen, images, labels = converged()
    with pytest.raises(ThreatModelError, match=f"as many as the 2 unknown ones .* got {m}: give 2"):
        attack.check(Candidates(seen, images[:m], labels[:m]))


def test_known_images_and_labels_must_fit() -> None:
    seen, images, labels = converged()
    with pytest.raises(ShapeError, match="together"):
        replace(seen, known_labels=None)
    for known_images, known_labels in ((images, labels), (images[:2], labels[:3]), (images[:2, :, 1:], labels[:2])):
        with pytest.raises(ShapeError, match=r"known_images must be \(j, 1, 4, 4\) .* one label for each"):
            replace(seen, known_images=known_images, known_labels=known_labels)


def test_images_of_inactive_neurons_that_are_known_are_not_returned() -> None:
    images, labels = digits()[0][:10], labels_for(LOGISTIC, 10)
    seen = replace(victim_of_digits(), known_images=images[:7], known_labels=labels[:7])
    found = InactiveNeurons(60)(noise(seen, 3))
    errors = (images[7:, None] - found.images).abs().flatten(2).amax(dim=2)
    assert errors.amin(dim=1).max() < 1e-9
    assert found.certified is not None
    assert found.certified.all()
    fewer = InactiveNeurons(60)(noise(seen, 2))
    assert any("3 images were found, of which 2 are returned" in note for note in fewer.notes)


def test_a_stationarity_attack_that_diverges_names_its_rate() -> None:
    seen, images, labels = converged()
    attack = MarginKKT(steps=30, optimizer="sgd", lr=1e200, min_multiplier=0.0)
    with pytest.raises(ConfigError, match=r"diverged at step \d+: .*lower lr=1e\+200"):
        attack(unknown(seen, images, labels))


def test_a_network_in_training_mode_is_attacked_in_evaluation_mode() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(4, 1))
    weights = {name: weight.detach() for name, weight in network.named_parameters()}
    seen = ReleasedModel(network, weights, "binary", (1, 2, 2), 2, torch.zeros(1, 2, 2), 2)
    images = torch.rand(3, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    assert torch.equal(seen.model(images), network[2](images.flatten(1)))
    assert network.training, "the caller's network stays as it is"
