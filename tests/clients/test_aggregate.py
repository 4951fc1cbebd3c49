"""Secure aggregation: the mean, and nothing but the mean."""

from __future__ import annotations

import pytest
import torch

from lit_recon.clients import ClientSettings, GradientOperator
from lit_recon.clients.aggregate import SecureAggregation, normalized_apart
from lit_recon.clients.local_steps import LocalSteps
from lit_recon.errors import ConfigError, ShapeError
from lit_recon.models import Backbone, ConvNet
from lit_recon.records import Batch, BatchNormMode, Knowledge, Normalization, Weights

SHAPE = (1, 6, 6)


def backbone(norm: str = "group") -> Backbone:
    torch.manual_seed(0)
    return Backbone(ConvNet(SHAPE, widths=[4, 6], norm=norm), 5, Normalization((0.5,), (0.25,)))


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(12, *SHAPE, generator=torch.Generator().manual_seed(1)), torch.arange(12) % 5


@pytest.mark.parametrize("clients", [1, 2, 3, 12])
def test_the_mean_of_gradients_is_the_gradient_of_all(batch: tuple, clients: int) -> None:
    model = backbone()
    operator = GradientOperator(model)
    whole = operator(Weights.of(model), Batch(*batch))
    released = SecureAggregation(operator, clients)(Weights.of(model), Batch(*batch))
    for name, value in whole.items():
        torch.testing.assert_close(released[name], value, rtol=0, atol=1e-6)


def test_the_mean_of_local_trainings_is_not_training_on_all(batch: tuple) -> None:
    model = backbone()
    operator = LocalSteps(model, 3, lr=1.0)
    singles = [operator(Weights.of(model), Batch(*batch).examples(i, i + 4)) for i in (0, 4, 8)]
    released = SecureAggregation(operator, 3)(Weights.of(model), Batch(*batch))
    together = operator(Weights.of(model), Batch(*batch))
    for name, value in released.items():
        mean = torch.stack([single[name].double() for single in singles]).mean(0)
        torch.testing.assert_close(value.double(), mean, rtol=0, atol=1e-6)
    assert max(float((value - together[name]).abs().max()) for name, value in released.items()) > 1e-3


@pytest.mark.parametrize(
    ("norm", "mode", "expected"), [("batch", "train", 3), ("batch", "eval", 1), ("group", "train", 1)]
)
def test_images_are_normalized_apart_where_layers_use_statistics_of_a_batch(
    batch: tuple, norm: str, mode: BatchNormMode, expected: int
) -> None:
    client = ClientSettings(n_clients=3, batch_norm=mode).client(backbone(norm))
    assert normalized_apart(client.observe(*batch, Knowledge(), torch.Generator()), mode) == expected


def test_statistics_of_equal_shares_are_pooled(batch: tuple) -> None:
    model = backbone("batch")
    operator = GradientOperator(model)
    update, statistics = SecureAggregation(operator, 3).with_statistics(Weights.of(model), Batch(*batch))
    alone = SecureAggregation(operator, 3).statistics(Weights.of(model), Batch(*batch))
    whole, expected = operator.with_statistics(Weights.of(model), Batch(*batch))
    for name, value in whole.items():
        torch.testing.assert_close(update[name], value, rtol=0, atol=1e-6)
    for name, layer in expected.items():
        assert torch.equal(alone[name].var, statistics[name].var)
        torch.testing.assert_close(statistics[name].var, layer.var, rtol=1e-4, atol=1e-6)


def test_differentiable_alone_and_under_vmap(batch: tuple) -> None:
    model = backbone().double()
    operator = SecureAggregation(LocalSteps(model, 2, lr=0.5), 3)
    images = batch[0][:3].double().requires_grad_()
    labels = batch[1][:3]

    def loss(images: torch.Tensor, functional: bool) -> torch.Tensor:
        update = operator(Weights.of(model), Batch(images, labels), "functional" if functional else "autograd")
        return torch.stack([value.square().sum() for value in update.values()]).sum()

    expected = torch.autograd.grad(loss(images, False), images)[0]
    mapped = torch.func.vmap(torch.func.grad(lambda images: loss(images, True)))(images.detach()[None])
    torch.testing.assert_close(mapped[0], expected)


def test_bad_input_is_refused(batch: tuple) -> None:
    model = backbone()
    with pytest.raises(ConfigError, match="at least 1 client"):
        SecureAggregation(GradientOperator(model), 0)
    with pytest.raises(ShapeError, match="multiple of 5"):
        SecureAggregation(GradientOperator(model), 5)(Weights.of(model), Batch(*batch))
