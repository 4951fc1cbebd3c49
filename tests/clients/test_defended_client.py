"""A client with a defense releases what the defense makes of its gradient, and tells of it only if it should."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lit_recon.attacks.updates import GradientMatching, KnownLabels
from lit_recon.clients import Client, ClientSettings
from lit_recon.defenses import (
    Batch,
    Chain,
    Defense,
    GaussianNoise,
    GradientPruning,
    MixUp,
    NetworkDropout,
    PerExampleClipping,
    Round,
    Stage,
)
from lit_recon.defenses.release import batches_of_clients
from lit_recon.errors import ConfigError, ShapeError
from lit_recon.models import MLP, Backbone
from lit_recon.records import Knowledge, Normalization, Observation, Update

SHAPE = (1, 6, 6)


@pytest.fixture
def model() -> Backbone:
    torch.manual_seed(0)
    return Backbone(MLP(SHAPE, [16]), 4, Normalization((0.5,), (0.25,)))


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(3, *SHAPE, generator=torch.Generator().manual_seed(1)), torch.tensor([3, 0, 2])


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def test_no_defense_is_bit_for_bit_the_plain_gradient(model: Backbone, batch: tuple) -> None:
    plain, identity = Client(model).release(*batch).update, Client(model, defense=Defense()).release(*batch).update
    assert all(torch.equal(identity[name], value) for name, value in plain.items())


def test_release_is_what_the_defense_makes_of_the_gradient(model: Backbone, batch: tuple) -> None:
    plain = torch.cat([value.flatten() for value in Client(model).release(*batch).update.values()])
    noisy = Client(model, defense=GaussianNoise(0.01)).release(*batch, generator()).update
    difference = torch.cat([value.flatten() for value in noisy.values()]) - plain
    assert float(difference.std()) == pytest.approx(0.01, rel=4 / (2 * len(plain)) ** 0.5)
    again = Client(model, defense=GaussianNoise(0.01)).release(*batch, generator()).update
    assert all(torch.equal(again[name], value) for name, value in noisy.items())


def test_clipping_reaches_what_the_attacker_gets(model: Backbone, batch: tuple) -> None:
    bound = 1e-3
    seen = Client(model, defense=PerExampleClipping(bound)).observe(*batch, Knowledge())
    norm = torch.cat([value.flatten() for value in seen.update.values()]).norm()
    assert 0 < float(norm) <= bound * (1 + 1e-5)


def test_only_an_attacker_who_knows_it_sees_the_defense(model: Backbone, batch: tuple) -> None:
    client = Client(model, defense=Chain([PerExampleClipping(0.1), GradientPruning(0.5)]))
    assert client.observe(*batch).defense is None
    seen = client.observe(*batch, Knowledge(defense=True))
    assert seen.defense is client.defense
    with pytest.raises(ShapeError, match="defense"):
        Observation(**{**vars(seen), "defense": None})


@pytest.mark.parametrize("n_clients", [1, 2])
def test_single_examples_without_statistics_are_refused_at_once(n_clients: int) -> None:
    """BatchNorm after a linear layer has one value per channel of a single example."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    public = Client(model, image_shape=SHAPE).model
    images, labels = torch.rand(4, *SHAPE), torch.tensor([3, 0, 2, 1])
    client = ClientSettings(n_clients=n_clients).client(public, PerExampleClipping(0.1))
    with pytest.raises(ConfigError, match="on one at a time; .*set knowledge.batch_norm to running, or knowledge.def"):
        client.observe(images, labels, Knowledge(defense=True, batch_norm="none"))
    for knowledge in (Knowledge(labels=True, defense=True), Knowledge(labels=True, batch_norm="none")):
        GradientMatching(steps=1, labels=KnownLabels())(client.observe(images, labels, knowledge))


class Doubled(Defense):
    """Overrides one stage of three, and says so nowhere else."""

    def transform_update(self, update: Update, round_: Round, generator: torch.Generator) -> Update:
        return {name: 2 * value for name, value in update.items()}


class DoubledExamples(Defense):
    def transform_per_example(self, gradients: Update, generator: torch.Generator) -> Update:
        return {name: 2 * value for name, value in gradients.items()}


class Repeated(Defense):
    def transform_batch(self, batch: Batch, model: Backbone, generator: torch.Generator) -> Batch:
        return batch._replace(images=batch.images[:1].expand_as(batch.images))


@pytest.mark.parametrize("share_statistics", [True, False], ids=["batch_norm: batch", "batch_norm: running"])
@pytest.mark.parametrize(
    ("defense", "stage"),
    [
        (Doubled(), Stage.UPDATE),
        (DoubledExamples(), Stage.PER_EXAMPLE),
        (Repeated(), Stage.BATCH),
        (Chain([Doubled()]), Stage.UPDATE),
    ],
    ids=repr,
)
def test_a_defense_from_outside_the_package_is_applied(
    defense: Defense, stage: Stage, share_statistics: bool, model: Backbone, batch: tuple
) -> None:
    assert defense.stages == (stage,)
    images, labels = batch
    released = Client(model, defense=defense).release(images, labels, share_statistics=share_statistics).update
    if stage == Stage.BATCH:
        images, factor = images[:1].expand_as(images), 1.0
    else:
        factor = 2.0
    for name, value in Client(model).release(images, labels).update.items():
        torch.testing.assert_close(released[name], factor * value)


def normalized(n_clients: int, defense: Defense) -> Client:
    torch.manual_seed(0)
    layers = nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
    public = Client(nn.Sequential(*layers), image_shape=SHAPE).model
    return ClientSettings("train", n_clients=n_clients).client(public, defense)


@pytest.mark.parametrize("n_clients", [1, 2])
def test_shared_statistics_are_those_of_the_mixtures_that_the_update_is_of(n_clients: int) -> None:
    defense, images, labels = MixUp(1.0), torch.rand(4, *SHAPE), torch.tensor([3, 0, 2, 1])
    client = normalized(n_clients, defense)
    released = client.release(images, labels, generator())
    shares = batches_of_clients(defense, client.model, Batch(images, labels), generator(), n_clients)
    mixtures = Batch(*(torch.cat(parts) for parts in zip(*(share[:2] for share, _ in shares), strict=True)))
    seen = normalized(n_clients, Defense()).observe(images, labels)
    update, statistics = seen.operator.with_statistics(seen.weights, mixtures)
    assert released.batch_statistics is not None
    torch.testing.assert_close(released.update, update)
    torch.testing.assert_close(released.batch_statistics, statistics)


def test_shared_statistics_are_those_behind_dropout() -> None:
    defense, images, labels = NetworkDropout(0.5, ["3"]), torch.rand(4, *SHAPE), torch.tensor([3, 0, 2, 1])
    client = normalized(1, defense)
    released = client.release(images, labels, generator()).batch_statistics
    [(dropped, _)] = batches_of_clients(defense, client.model, Batch(images, labels), generator())
    seen = client.observe(images, labels)
    assert released is not None
    torch.testing.assert_close(released, seen.operator.statistics(seen.weights, dropped))
    whole = seen.operator.statistics(seen.weights, Batch(images, labels))
    assert not torch.allclose(released["4"].mean, whole["4"].mean)


def test_stages_set_by_hand_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"ByHand\.stages cannot be set"):
        type("ByHand", (Defense,), {"stages": (Stage.UPDATE,)})


class ClassLoss(nn.Module):
    """Of classes only."""

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.nll_loss(logits.log_softmax(1), labels)


def test_mixed_labels_need_a_loss_of_probabilities() -> None:
    torch.manual_seed(0)
    model = Backbone(MLP((1, 6, 6), [8]), 4, Normalization((0.5,), (0.25,)))
    images, labels = torch.rand(3, 1, 6, 6), torch.tensor([0, 1, 2])
    with pytest.raises(
        ConfigError, match=r"MixUp\(alpha=1.0\) turns labels into probabilities, but the loss ClassLoss"
    ):
        Client(model, defense=MixUp(1.0), loss=ClassLoss()).release(images, labels)
    for defense in (MixUp(0.0), NetworkDropout(0.5)):  # neither mixes labels
        Client(model, defense=defense, loss=ClassLoss()).release(images, labels)
    Client(model, defense=MixUp(1.0), loss=nn.CrossEntropyLoss(label_smoothing=0.1)).release(images, labels)
