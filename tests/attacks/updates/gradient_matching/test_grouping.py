"""Batches whose update depends on which images a client took together."""

from __future__ import annotations

import itertools
from math import comb

import pytest
import torch
from torch import Tensor, nn

from lit_recon.attacks.updates import (
    LBFGS,
    FeaturesOnly,
    GradientMatching,
    GroupConsistency,
    HeadCounts,
    KnownLabels,
    MapMatching,
    TotalVariation,
)
from lit_recon.attacks.updates.feature_maps.matching import ANGLE
from lit_recon.attacks.updates.first_applicable import _better
from lit_recon.attacks.updates.gradient_matching.further import StartsSoFar
from lit_recon.attacks.updates.gradient_matching.matching import exchanged, groupings, regrouped, update_distance
from lit_recon.attacks.updates.gradient_matching.state import MatchingState
from lit_recon.clients import Client, ClientSettings, LocalTraining
from lit_recon.clients.aggregate import parts_of
from lit_recon.data.sources import Digits
from lit_recon.defenses import GradientClipping
from lit_recon.metrics import RMSE, score_batch
from lit_recon.models import Backbone, ConvNet
from lit_recon.records import Knowledge, Normalization, Observation, Reconstruction
from tests.attacks.updates.feature_maps.patch_victims import two_clients

MINI_BATCHES = ClientSettings(local_steps=LocalTraining(steps=2, batches=2, lr=0.1))


def client_of(settings: ClientSettings, knowledge: Knowledge, clipped: bool = False) -> tuple[Observation, Tensor]:
    """What a client shows of the digits 7, 1, 9 and 2, in that order, and their images."""
    torch.manual_seed(0)
    trunk = ConvNet((1, 8, 8), widths=[16, 16], norm="group", activation="elu")
    model = Backbone(trunk, 10, Normalization((0.3,), (0.37,)))
    _, test = Digits().load()
    labels = torch.tensor([7, 1, 9, 2])
    images = test.pixels(torch.stack([(test.labels == label).nonzero()[0, 0] for label in labels]))
    client = settings.client(model, GradientClipping(0.1) if clipped else None)
    return client.observe(images, labels, knowledge), images


@pytest.mark.parametrize(
    ("settings", "clipped", "parts"),
    [
        (ClientSettings(), True, 1),
        (ClientSettings(n_clients=2), False, 1),  # the mean of their gradients is that of all images
        (ClientSettings(n_clients=2), True, 2),
        (MINI_BATCHES, False, 2),
        (ClientSettings(local_steps=LocalTraining(steps=2), n_clients=2), False, 2),
        (ClientSettings(local_steps=LocalTraining(steps=2, batches=2), n_clients=2), False, 4),
    ],
)
def test_parts_are_those_between_which_images_cannot_change_places(
    settings: ClientSettings, clipped: bool, parts: int
) -> None:
    seen, images = client_of(settings, Knowledge(labels=True, defense=True), clipped)
    assert seen.labels is not None
    assert parts_of(seen) == parts
    other = torch.tensor([0, 2, 1, 3])
    apart = update_distance(seen, images[other], seen.labels[other])
    assert apart < 1e-6 if parts == 1 else apart > 1e-4


def test_known_labels_tell_the_mini_batches() -> None:
    labels, _ = KnownLabels()(client_of(MINI_BATCHES, Knowledge(labels=True))[0])
    assert labels.tolist() == [7, 1, 9, 2]
    labels, _ = KnownLabels()(client_of(ClientSettings(), Knowledge(labels=True))[0])
    assert labels.tolist() == [1, 2, 7, 9]


def test_mini_batches_are_not_sought_where_labels_are_given() -> None:
    found = GradientMatching(steps=1)(client_of(MINI_BATCHES, Knowledge(labels=True))[0])
    assert found.labels.tolist() == [7, 1, 9, 2]
    assert found.notes == ()


def test_every_grouping_of_labels_comes_once() -> None:
    labels = torch.tensor([3, 4, 5, 5])
    found = [
        tuple(sorted(group.tolist()) for group in labels[order].chunk(2))
        for order in itertools.islice(groupings(labels, 2, seed=0), 4)
    ]
    assert found[0] == ([3, 4], [5, 5])
    assert len({str(one) for one in found}) == 4  # of comb(4, 2) = 6 with distinct labels
    distinct = itertools.islice(groupings(torch.arange(4), 2, seed=0), comb(4, 2))
    assert len({str(sorted(order[:2].tolist())) for order in distinct}) == 6


def test_exchanges_lower_the_loss() -> None:
    target = torch.tensor([2, 0, 5, 1, 3, 4])
    groups = [set(group.tolist()) for group in target.chunk(3)]

    def loss(order: Tensor) -> float:
        own = order.chunk(3)
        return float(sum(int(i) not in group for group, part in zip(groups, own, strict=True) for i in part)) + 0.1

    generator = torch.Generator().manual_seed(0)
    order = torch.arange(6)
    for _ in range(4):
        order = order[exchanged(6, 3, lambda other, order=order: loss(order[other]), 100, generator)]  # type: ignore[misc]
    assert loss(order) == pytest.approx(0.1)
    for constant in (1.0, -1.0):  # log-likelihoods may have either sign
        assert torch.equal(exchanged(6, 3, lambda order, value=constant: value, 100, generator), torch.arange(6))  # type: ignore[misc]


def test_images_found_are_put_together_again() -> None:
    seen, images = client_of(MINI_BATCHES, Knowledge())
    labels = torch.tensor([7, 1, 9, 2])
    mixed = torch.tensor([2, 0, 3, 1])
    order = mixed[regrouped(seen, images[mixed], labels[mixed], observed_only=False, seed=0)]
    assert sorted(order[:2].tolist()) == [0, 1]
    assert update_distance(seen, images[order], labels[order]) < 1e-5  # measured 0


def test_images_of_another_attack_are_put_where_they_explain_the_update() -> None:
    seen, images = client_of(MINI_BATCHES, Knowledge())
    labels = torch.tensor([7, 1, 9, 2])
    found = images.clone()
    found[1:3] = 0.5
    notes = ("image 2: gray", "image 4: of label 2", "all")
    ours = Reconstruction(found, labels, 1.0, certified=torch.tensor([True, False, False, True]), notes=notes)
    order = torch.tensor([2, 1, 3, 0])  # the places of images 1 and 2 are taken by 2 and 1
    theirs = Reconstruction(images[order], labels[order], 1.0, notes=("image 1: of label 9", "image 3: of label 2"))
    better = _better(seen, ours, theirs, "another")
    assert update_distance(seen, better.images, better.labels) < 1e-5  # measured 0
    assert better.certified is not None
    assert sorted(better.labels[better.certified].tolist()) == [2, 7]
    # notes on images are on those that are there, by their new places
    place = {label: number for number, label in enumerate(better.labels.tolist(), start=1)}
    first, second, tried, third = better.notes
    assert (first, second, third) == (f"image {place[2]}: of label 2", "all", f"image {place[9]}: of label 9")
    assert tried.startswith("another was tried")


@pytest.mark.slow
def test_gradient_matching_finds_out_which_images_were_together() -> None:
    seen, images = client_of(MINI_BATCHES, Knowledge())
    attack = GradientMatching(labels=HeadCounts(), priors=[TotalVariation(1e-4)], steps=300, execution="loop")
    found = attack(seen)
    scores = score_batch(found.images, images, found.labels, torch.tensor([7, 1, 9, 2]), [RMSE()])
    assert sorted(found.labels[:2].tolist()) == [1, 7]
    assert float(scores.per_image["rmse"].mean()) < 0.15  # measured 0.05; grouped by ascending labels 0.33
    assert any("which mini-batch or client had which image" in note for note in found.notes)


@pytest.fixture(scope="module")
def clipped() -> tuple[Observation, Tensor, Tensor]:
    """The mean of two clients' gradients, each clipped by itself, and their images and labels in order."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 64, 3, 2, 1), nn.ReLU(), nn.Conv2d(64, 128, 3, 1, 1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)),
    )
    with torch.no_grad():
        model[6].weight.mul_(30)  # type: ignore[operator]  # a tensor
    normalization, labels = Normalization((0.5,) * 3, (0.25,) * 3), torch.tensor([0, 0, 1, 2])
    shape = {"image_shape": (3, 8, 8), "normalization": normalization}
    client = Client(model, "eval", GradientClipping(0.05), two_clients, **shape)  # type: ignore[arg-type]
    images = torch.rand(4, 3, 8, 8)
    return client.observe(images, labels, Knowledge(defense=True)), images, labels


@pytest.mark.slow
def test_images_of_several_clients_are_certified_in_the_order_of_clients(
    clipped: tuple[Observation, Tensor, Tensor],
) -> None:
    seen, images, labels = clipped
    penalty = MapMatching().prepare(seen)
    order = penalty.in_order(images)
    assert not torch.equal(order.sort().indices, order)  # nor is it the clients'
    certified, final, notes = penalty.certificate(images, labels)
    assert certified.all(), notes
    assert final
    wrong = images.clone()
    wrong[1] = images[1].flip(1)
    assert penalty.certificate(wrong, labels)[0].tolist() == [False] * 4
    assert (penalty.angles(wrong) <= ANGLE).tolist() == [True, False, True, True]
    # found in other orders, and one of the images in the second place only
    before = Reconstruction(wrong, labels, 0.0, certified=torch.tensor([True, False, True, True]))
    other = torch.tensor([3, 2, 1, 0])
    after = Reconstruction(images[other], labels[other], 0.0, certified=torch.zeros(4, dtype=torch.bool))
    closer = penalty.closer(before, after, "again")
    assert closer.certified is not None
    assert closer.certified.all(), closer.notes
    # a further start keeps images in the places of their maps
    attack = GradientMatching(FeaturesOnly(), features=MapMatching(approach=0), solver=LBFGS(), steps=1)
    run = attack._further(attack.begin([seen]), 1, [before], StartsSoFar())
    assert run is not None
    assert isinstance(run.state, MatchingState)
    kept, places = run.state.problems[0].kept  # type: ignore[misc]  # certified images are kept
    assert torch.equal(places, wrong[penalty.in_order(wrong)])
    assert torch.equal(places[~kept.flatten()], wrong[1:2])
    # another attack begins with images in the places of their maps and with their labels
    followed = attack.follow([before], [seen])
    assert isinstance(followed.state, MatchingState)
    problem, order = followed.state.problems[0], penalty.in_order(wrong)
    torch.testing.assert_close(problem.images(attack.parametrization).detach(), wrong[order])
    assert problem.labels.tolist() == labels[order].tolist() != labels.tolist()


def test_group_consistency_compares_images_of_the_same_label() -> None:
    """Restarts begin with other groupings: their candidates are alike in the order in which they were drawn."""
    seen, _ = client_of(MINI_BATCHES, Knowledge())
    attack = GradientMatching(priors=[GroupConsistency(1.0, start=0.0)], steps=1, restarts=2, execution="loop")
    state = attack.init([seen])
    first, second = state.problems
    assert not torch.equal(first.labels, second.labels)
    second.variables["pixels"].data.copy_(first.variables["pixels"].data)
    attack._evaluate(state, [0, 1])
    for problem in state.problems:
        assert problem.trace["GroupConsistency"][0] < 1e-6  # measured 0; compared by place 0.19
