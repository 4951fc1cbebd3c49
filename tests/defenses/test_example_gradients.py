"""Norms and weighted sums of the gradients of single examples, against a slow loop."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lit_recon.clients import GradientOperator
from lit_recon.defenses import DPSGD, Batch, Defense, PerExampleClipping, defended_gradient
from lit_recon.defenses.release import per_example_gradients
from lit_recon.models import Backbone, ConvNet, ResNet18, WideFeatureLayer
from lit_recon.records import Normalization, Update, Weights

SHAPE = (3, 16, 16)
PLAIN = Normalization((0.5,) * 3, (0.25,) * 3)


class Tokens(nn.Module):
    """Patches of the image as tokens, each through the same linear layers; one of them may be used twice."""

    def __init__(self, twice: bool = False) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Linear(48, 6), nn.Linear(6, 6), nn.Linear(6, 5, bias=False)
        self.twice = twice

    def forward(self, images: Tensor) -> Tensor:
        patches = images.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).reshape(len(images), 4, 4, 48)
        tokens = self.mix(torch.tanh(self.embed(patches)))
        return self.head(torch.tanh(self.mix(tokens) if self.twice else tokens).mean((1, 2)))


class Reused(nn.Module):
    """The weight of the first layer is used by a function, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(768, 768), nn.Linear(768, 5)

    def forward(self, images: Tensor) -> Tensor:
        seen = torch.tanh(self.first(images.flatten(1)))
        return self.head(torch.tanh(nn.functional.linear(seen, self.first.weight)))


class Flattened(nn.Module):
    """Patches of all images, one after the other, through a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(48, 6), nn.Linear(6, 5)

    def forward(self, images: Tensor) -> Tensor:
        patches = images.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).reshape(-1, 48)
        return self.head(torch.tanh(self.embed(patches)).view(len(images), -1, 6).mean(1))


class PatchesFirst(nn.Module):
    """Four patches of every image, along the first axis, through a linear layer: as many as there are images."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(192, 6), nn.Linear(6, 5)

    def forward(self, images: Tensor) -> Tensor:
        patches = images.unfold(2, 8, 8).unfold(3, 8, 8).permute(2, 3, 0, 1, 4, 5).reshape(4, len(images), 192)
        return self.head(torch.tanh(self.embed(patches)).mean(0))


class Halved(nn.Linear):
    """A layer that is not what its class says."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) / 2


class Overwriting(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.mul_(2)


def tied() -> nn.Module:
    first, second = nn.Linear(768, 768), nn.Linear(768, 768)
    second.weight = first.weight
    return nn.Sequential(nn.Flatten(), first, nn.Tanh(), second, nn.Linear(768, 5))


def convolutions(**settings: object) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, **settings), nn.Tanh(), nn.Flatten(), nn.LazyLinear(5))


def resnet() -> nn.Module:
    torch.manual_seed(0)
    layer = WideFeatureLayer(32, n_neurons=24, n_trained=10, activation="gelu")
    layer.set_center(torch.linspace(-1, 1, 64).view(2, 32))
    return Backbone(ResNet18(SHAPE, width=4, norm="group"), 5, PLAIN, layer)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "convolutions, strides, GroupNorm, wide layer": resnet,
    "more weights than places": lambda: Backbone(
        ConvNet(SHAPE, widths=[8, 64], norm="none", activation="gelu"), 5, PLAIN
    ),
    "padding, dilation, no bias": lambda: convolutions(padding=2, dilation=2, stride=(2, 1), bias=False),
    "tokens": Tokens,
    "the first output is overwritten": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(768, 8), Overwriting(), nn.Tanh(), nn.Linear(8, 5)
    ),
}
#: Models of which single gradients have to be computed.
OTHERS: dict[str, Callable[[], nn.Module]] = {
    "groups": lambda: nn.Sequential(nn.Conv2d(3, 6, 3, groups=3), nn.Flatten(), nn.LazyLinear(5)),
    "padding by other pixels": lambda: convolutions(padding_mode="circular", padding=1),
    "a layer that takes the patches of all images": Flattened,
    "a layer whose first axis is that of patches": PatchesFirst,
    "a layer that is used twice": lambda: Tokens(twice=True),
    "a weight of two layers": tied,
    "a weight of a layer and a function": Reused,
    "a layer of another class": lambda: nn.Sequential(nn.Flatten(), Halved(768, 5)),
    "an output that is overwritten": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(768, 8), nn.Tanh(), nn.Linear(8, 8), Overwriting(), nn.Linear(8, 5)
    ),
    "a weight that is computed from another": lambda: nn.Sequential(
        nn.Flatten(), torch.nn.utils.spectral_norm(nn.Linear(768, 5))
    ),
    "a layer of another kind": lambda: nn.Sequential(nn.Flatten(), nn.LayerNorm(768), nn.Linear(768, 5)),
}


@pytest.fixture
def batch() -> Batch:
    images = torch.rand(4, *SHAPE, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return Batch(images, torch.tensor([1, 0, 3, 3]))


def built(make: Callable[[], nn.Module], batch: Batch) -> tuple[GradientOperator, Weights]:
    torch.manual_seed(1)
    model = make().double()
    with torch.no_grad():
        model(batch.images)  # sets the sizes of lazy layers
    return GradientOperator(model), Weights.of(model)


@pytest.mark.parametrize("name", MODELS)
def test_norms_and_weighted_sums_are_those_of_single_gradients(name: str, batch: Batch) -> None:
    operator, weights = built(MODELS[name], batch)
    found = operator.examples(weights, batch)
    assert found is not None
    single = list(per_example_gradients(lambda *given: operator(weights, *given), batch))
    squares = [sum(float(value.square().sum()) for value in one.values()) for one in single]
    torch.testing.assert_close(found.squared_norms(), torch.tensor(squares, dtype=torch.float64), rtol=1e-9, atol=0)
    factors = torch.tensor([0.3, 1.0, 0.0, 0.25], dtype=torch.float64)
    weighted = found.weighted(factors)
    assert list(weighted) == list(weights.parameters)
    for key, value in weighted.items():
        expected = sum(factor * one[key][0] for factor, one in zip(factors, single, strict=True))
        torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_the_weights_may_be_on_another_device_than_the_model(name: str, batch: Batch) -> None:
    operator, weights = built(MODELS[name], batch)
    expected = operator.examples(weights, batch)
    found = GradientOperator(built(MODELS[name], batch)[0]._model.to("meta")).examples(weights, batch)
    assert found is not None
    assert expected is not None
    factors = torch.tensor([0.3, 1.0, 0.0, 0.25], dtype=torch.float64)
    torch.testing.assert_close(found.weighted(factors), expected.weighted(factors))
    torch.testing.assert_close(found.squared_norms(), expected.squared_norms())


@pytest.mark.parametrize("name", OTHERS)
def test_other_layers_are_left_to_the_loop(name: str, batch: Batch) -> None:
    operator, weights = built(OTHERS[name], batch)
    assert operator.examples(weights, batch) is None


@pytest.mark.parametrize("defense", [DPSGD(1.0, 0.5), PerExampleClipping(1.0)], ids=repr)
def test_a_release_is_the_same_with_and_without_single_gradients(batch: Batch, defense: Defense) -> None:
    """The bound lies between the norms, so that some gradients are clipped and others are not."""
    operator, weights = built(MODELS["tokens"], batch)
    asked = []

    def examples(given: Batch) -> object:
        asked.append(operator.examples(weights, given))
        norms = asked[-1].squared_norms().sqrt()
        assert norms.min() < 1 < norms.max()
        return asked[-1]

    def release(**given: object) -> Update:
        drawn = torch.Generator().manual_seed(3)
        return defended_gradient(
            defense, nn.Identity(), lambda *batch: operator(weights, *batch), batch, drawn, **given
        )

    slow, fast = release(), release(examples=examples)
    assert len(asked) == 1
    for name, value in slow.items():
        torch.testing.assert_close(fast[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("base", [Defense, PerExampleClipping, DPSGD])
def test_a_defense_that_does_more_than_scale_gets_every_gradient(batch: Batch, base: type[Defense]) -> None:
    """So does a subclass whose base only scales: the training would be that of the base, not of what is attacked."""

    class SignOfEach(base):
        def transform_per_example(self, gradients: Update, generator: torch.Generator) -> Update:
            return {name: value.sign() for name, value in gradients.items()}

    operator, weights = built(MODELS["tokens"], batch)
    gradient = lambda *given: operator(weights, *given)  # noqa: E731
    plain, other = (
        defended_gradient(SignOfEach(), nn.Identity(), gradient, batch, torch.Generator(), examples=examples)
        for examples in (None, lambda given: operator.examples(weights, given))
    )
    assert all(torch.equal(value, other[name]) for name, value in plain.items())


def test_lower_precision_keeps_the_norms(batch: Batch) -> None:
    """Under autocast to bfloat16 of 8 bits, through two layers; the threshold is twelve of its rounding errors."""
    operator, weights = built(MODELS["more weights than places"], batch)
    exact = operator.examples(weights, batch)
    lower = Weights(*({k: v.float() if v.is_floating_point() else v for k, v in part.items()} for part in weights))
    with torch.autocast("cpu", torch.bfloat16):
        found = operator.examples(lower, Batch(batch.images.float(), batch.labels))
        assert exact is not None
        assert found is not None
        ratio = found.squared_norms().double() / exact.squared_norms()
        assert (ratio - 1).abs().max() < 0.05
        weighted, expected = found.weighted(torch.ones(4)), exact.weighted(torch.ones(4, dtype=torch.float64))
    assert all(value.dtype == torch.float32 for value in weighted.values())
    apart = sum(float((weighted[k].double() - v).square().sum()) for k, v in expected.items())
    assert apart < 0.05**2 * sum(float(v.square().sum()) for v in expected.values())
