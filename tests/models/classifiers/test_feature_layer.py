"""The wide layer: its function, its frozen rows, and the running center."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lit_recon.errors import ConfigError, ShapeError
from lit_recon.models import WideFeatureLayer


def some_features(n: int = 6, d: int = 5, seed: int = 0) -> Tensor:
    """Positive, as behind a ReLU."""
    return torch.rand(n, d, generator=torch.Generator().manual_seed(seed)) + 1


def all_rows(layer: WideFeatureLayer, parameter: str = "weight") -> Tensor:
    """Weights or biases of all neurons, trained before random."""
    return torch.cat([getattr(part, parameter) for part in (layer.trained, layer.random) if part is not None]).detach()


def test_the_definition() -> None:
    torch.manual_seed(0)
    layer = WideFeatureLayer(5, n_neurons=7, n_trained=3, activation="tanh").eval()
    features, public = some_features(), some_features(50, seed=1)
    layer.set_center(public)
    x = features.numpy().astype(np.float64) - public.numpy().mean(axis=0)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    expected = np.tanh(x @ all_rows(layer).numpy().T + all_rows(layer, "bias").numpy())
    np.testing.assert_allclose(layer(features).detach().numpy(), expected, atol=1e-6)


@pytest.mark.parametrize("scale", [1e-2, 1.0, 1e4])
def test_directions_have_unit_norm_at_any_scale(scale: float) -> None:
    layer = WideFeatureLayer(5, 8, 4).eval()
    torch.testing.assert_close(layer.directions(scale * some_features()).norm(dim=1), torch.ones(6))


def test_the_center_itself_has_no_direction_but_a_derivative() -> None:
    layer = WideFeatureLayer(5, 8, 4).eval()
    features = torch.zeros(1, 5, requires_grad=True)
    (first,) = torch.autograd.grad(layer(features).sum(), features, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), features)
    assert torch.equal(layer.directions(features), torch.zeros(1, 5))
    assert torch.isfinite(first).all()
    assert torch.isfinite(second).all()


@pytest.mark.parametrize("n_trained", [0, 3, 8])
def test_rows_are_trained_or_standard_normal(n_trained: int) -> None:
    layer = WideFeatureLayer(5, n_neurons=8, n_trained=n_trained)
    bias = all_rows(layer, "bias")
    assert all_rows(layer).shape == (8, 5)
    assert bias.shape == (8,)
    assert torch.equal(bias[n_trained:], torch.zeros(8 - n_trained))
    assert layer(some_features()).shape == (6, 8)
    learns = sum(parameter.numel() for parameter in layer.parameters() if parameter.requires_grad)
    assert learns == 6 * n_trained
    assert sum(parameter.numel() for parameter in layer.parameters()) == 6 * 8


def test_random_rows_follow_the_normal_distribution() -> None:
    """Kolmogorov-Smirnov test at 1 %."""
    drawn = all_rows(WideFeatureLayer(64, n_neurons=512, n_trained=0)).flatten().sort().values
    distance = (torch.special.ndtr(drawn) - torch.arange(1, len(drawn) + 1) / len(drawn)).abs().max()
    assert distance < 1.63 * len(drawn) ** -0.5


def test_random_rows_are_a_function_of_the_seed_alone() -> None:
    torch.manual_seed(0)
    one = WideFeatureLayer(5, 8, 4, seed=3)
    torch.manual_seed(1)
    two = WideFeatureLayer(5, 8, 4, seed=3)
    assert torch.equal(all_rows(one)[4:], all_rows(two)[4:])
    assert not torch.equal(all_rows(one)[:4], all_rows(two)[:4])
    assert not torch.equal(all_rows(one)[4:], all_rows(WideFeatureLayer(5, 8, 4, seed=4))[4:])


def test_drawing_random_rows_leaves_the_global_stream_alone() -> None:
    drawn = []
    for n_neurons in (4, 8):
        torch.manual_seed(0)
        layer = WideFeatureLayer(5, n_neurons, n_trained=4)
        drawn.append((all_rows(layer)[:4], torch.rand(3)))
    assert all(torch.equal(one, two) for one, two in zip(*drawn, strict=True))


def test_the_running_center_is_a_mean_at_first_and_a_moving_mean_later() -> None:
    layer = WideFeatureLayer(5, 8, 4)
    batches = [some_features(seed=seed) for seed in range(30)]
    expected = torch.zeros(5)
    for count, batch in enumerate(batches, start=1):
        layer(batch)
        expected += max(1 / count, 0.1) * (batch.mean(dim=0) - expected)
        if count == 10:
            torch.testing.assert_close(expected, torch.stack(batches[:10]).mean(dim=(0, 1)))
        torch.testing.assert_close(layer.center, expected)


def test_training_and_evaluation_compute_the_same_function() -> None:
    """In training the center moves first and is then used: evaluation afterwards gives the very same numbers."""
    layer = WideFeatureLayer(5, 8, 4)
    for seed in range(3):
        in_training = layer.train()(some_features(seed=seed))
        assert torch.equal(layer.eval()(some_features(seed=seed)), in_training)


def test_evaluation_does_not_move_the_center() -> None:
    layer = WideFeatureLayer(5, 8, 4).eval()
    layer(some_features())
    assert torch.equal(layer.center, torch.zeros(5))
    assert layer.n_batches == 0


def test_centering_opens_the_cone_of_positive_features() -> None:
    layer = WideFeatureLayer(64, 8, 4).eval()
    features = some_features(200, 64)

    def mean_cosine(directions: Tensor) -> float:
        return float(directions.mean(dim=0).square().sum())

    assert mean_cosine(layer.directions(features)) > 0.9
    layer.set_center(some_features(1_000, 64, seed=1))
    assert mean_cosine(layer.directions(features)) < 0.05


def test_buffers_travel_with_the_state() -> None:
    layer, twin = WideFeatureLayer(5, 8, 4), WideFeatureLayer(5, 8, 4, seed=9)
    layer(some_features())
    twin.load_state_dict(layer.state_dict())
    assert torch.equal(twin.eval()(some_features(seed=2)), layer.eval()(some_features(seed=2)))


@pytest.mark.parametrize(("n_neurons", "n_trained"), [(0, 0), (4, 5), (4, -1)])
def test_impossible_numbers_of_neurons(n_neurons: int, n_trained: int) -> None:
    with pytest.raises(ConfigError, match=f"got n_neurons={n_neurons}, n_trained={n_trained}"):
        WideFeatureLayer(5, n_neurons, n_trained)


@pytest.mark.parametrize("shape", [(5,), (3, 4), (0, 5)])
def test_a_center_needs_features(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match=r"features must be \(n, 5\)"):
        WideFeatureLayer(5, 8, 4).set_center(torch.zeros(shape))


def test_frozen_rows_do_not_move_and_trained_rows_do() -> None:
    torch.manual_seed(0)
    layer = WideFeatureLayer(5, 8, 4)
    head = nn.Linear(8, 3)
    before = all_rows(layer)
    trainable = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD([*trainable, *head.parameters()], lr=0.1, weight_decay=0.1)
    nn.functional.cross_entropy(head(layer(some_features())), torch.arange(6) % 3).backward()
    optimizer.step()
    assert torch.equal(all_rows(layer)[4:], before[4:])
    assert (all_rows(layer)[:4] != before[:4]).any(dim=1).all()
