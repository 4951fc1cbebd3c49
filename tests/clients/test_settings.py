"""A configuration's clients are the clients that one would build by hand."""

from __future__ import annotations

import pytest
import torch

from lit_recon.clients import ClientSettings, GradientOperator, LocalSteps, LocalTraining
from lit_recon.defenses import DPSGD, GaussianNoise, GradientPruning, NetworkDropout
from lit_recon.errors import ConfigError
from lit_recon.models import MLP, Backbone, ConvNet
from lit_recon.records import Batch, Knowledge, Normalization, Weights

SHAPE = (1, 6, 6)
GREY = Normalization((0.5,), (0.25,))


@pytest.fixture
def model() -> Backbone:
    torch.manual_seed(0)
    return Backbone(MLP(SHAPE, [16]), 4, GREY)


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(4, *SHAPE, generator=torch.Generator().manual_seed(1)), torch.tensor([3, 0, 2, 1])


def test_one_step_of_one_client_is_its_gradient(model: Backbone, batch: tuple) -> None:
    released = ClientSettings().client(model).release(*batch).update
    expected = GradientOperator(model)(Weights.of(model), Batch(*batch))
    assert all(torch.equal(released[name], value) for name, value in expected.items())


def test_local_training_is_what_it_says(model: Backbone, batch: tuple) -> None:
    local = LocalTraining(steps=4, lr=0.1, momentum=0.5, layer_lrs={"head": 0.02}, batches=2, release="difference")
    released = ClientSettings(local_steps=local).client(model).release(*batch).update
    operator = LocalSteps(model, 4, 0.1, 0.5, {"head": 0.02}, 2, "difference")
    assert all(torch.equal(released[name], value) for name, value in operator(Weights.of(model), Batch(*batch)).items())


def test_secure_aggregation_hides_which_client_gave_what(model: Backbone, batch: tuple) -> None:
    local = LocalTraining(steps=3, lr=0.1)
    images, labels = batch
    together = ClientSettings(local_steps=local, n_clients=2).client(model).release(images, labels).update
    alone = ClientSettings(local_steps=local).client(model)
    halves = [alone.release(images[part], labels[part]).update for part in (slice(0, 2), slice(2, 4))]
    for name, value in together.items():
        torch.testing.assert_close(value, (halves[0][name] + halves[1][name]) / 2, rtol=1e-6, atol=1e-7)


def test_a_defense_acts_on_what_local_training_gives(model: Backbone, batch: tuple) -> None:
    local = ClientSettings(local_steps=LocalTraining(steps=3, lr=0.1))
    released = local.client(model, GradientPruning(0.75)).release(*batch).update
    zeros = sum(int((value == 0).sum()) for value in released.values())
    size = sum(value.numel() for value in released.values())
    assert zeros >= round(0.75 * size)
    assert zeros < size


def test_a_rule_is_built_on_the_model_that_the_defense_prepared(model: Backbone, batch: tuple) -> None:
    clients = ClientSettings(local_steps=LocalTraining(steps=2, lr=0.1))
    released = clients.client(model, NetworkDropout(0.5)).release(*batch, clients.generator(0)).update
    plain = clients.client(model).release(*batch).update
    assert not torch.equal(released["head.weight"], plain["head.weight"])


def test_every_client_draws_its_own_noise_and_draws_it_again(model: Backbone, batch: tuple) -> None:
    clients = ClientSettings(seed=5)
    client = clients.client(model, GaussianNoise(0.1))
    first, again, other = (client.release(*batch, clients.generator(index)).update for index in (0, 0, 1))
    assert torch.equal(first["head.weight"], again["head.weight"])
    assert not torch.equal(first["head.weight"], other["head.weight"])
    reseeded = client.release(*batch, ClientSettings(seed=6).generator(0)).update
    assert not torch.equal(first["head.weight"], reseeded["head.weight"])


def test_an_attacker_without_running_statistics_simulates_the_same_rule(batch: tuple) -> None:
    torch.manual_seed(0)
    model = Backbone(ConvNet(SHAPE, widths=[4], norm="batch"), 4, GREY)
    clients = ClientSettings(batch_norm="train", local_steps=LocalTraining(steps=2, lr=0.1))
    seen = clients.client(model).observe(*batch, Knowledge(batch_norm="none"))
    simulated = seen.operator(seen.weights, Batch(*batch))
    for name, value in seen.update.items():
        torch.testing.assert_close(simulated[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("n_clients", [1, 2])
def test_gradients_of_single_examples_need_a_client_that_releases_one_gradient(n_clients: int, model: Backbone) -> None:
    clients = ClientSettings(local_steps=LocalTraining(), n_clients=n_clients)
    with pytest.raises(ConfigError, match="GradientClipping"):
        clients.client(model, DPSGD(1.0, 1.0))


def test_a_federation_needs_a_client() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        ClientSettings(n_clients=0)
