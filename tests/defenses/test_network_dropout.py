"""Dropout inside the network, against torch.nn.functional and by what its gradient gives away."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from lit_recon.defenses import (
    Batch,
    BatchGradient,
    Chain,
    ExcludedVariables,
    GaussianNoise,
    NetworkDropout,
    defended_gradient,
)
from lit_recon.errors import ConfigError, UnsupportedModelError
from lit_recon.models import Backbone

GradientOf = Callable[[Backbone], BatchGradient]


def test_the_prepared_model_is_the_same_function(model: Backbone, batch: Batch) -> None:
    prepared = NetworkDropout(0.5).prepare(model)
    assert prepared is not model
    assert [name for name, _ in prepared.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert prepared.state_dict().keys() == model.state_dict().keys()
    assert torch.equal(prepared(batch.images), model(batch.images))


def test_gradient_is_that_of_masked_features(
    model: Backbone, gradient_of: GradientOf, batch: Batch, generator: torch.Generator
) -> None:
    defense = NetworkDropout(0.5)
    prepared = defense.prepare(model)
    masked = defense.transform_batch(batch, prepared, generator)
    (mask,) = masked.masks.values()
    assert set(mask.unique().tolist()) == {0.0, 2.0}
    loss = nn.functional.cross_entropy(model.head(model.trunk((batch.images - 0.5) / 0.25) * mask), batch.labels)
    expected = torch.autograd.grad(loss, list(model.parameters()))
    released = gradient_of(prepared)(masked)
    for value, name in zip(expected, released, strict=True):
        torch.testing.assert_close(released[name], value, rtol=1e-9, atol=1e-12)


class Tokens(nn.Module):
    """The rows of an image as tokens of one linear layer; flattened, those of all images are its examples."""

    def __init__(self, flattened: bool = False) -> None:
        super().__init__()
        self.embed, self.head, self.flattened = nn.Linear(6, 4), nn.Linear(4, 5), flattened

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        rows = images.squeeze(1)
        tokens = self.embed(rows.flatten(0, 1)).unflatten(0, rows.shape[:2]) if self.flattened else self.embed(rows)
        logits: torch.Tensor = self.head(torch.tanh(tokens).mean(1))
        return logits


@pytest.mark.parametrize("n", [1, 3, 6])
def test_the_tokens_of_an_example_share_its_mask(n: int, generator: torch.Generator) -> None:
    """Also with as many examples as tokens, where a mask of either would have the same shape."""
    defense, plain = NetworkDropout(0.5, ["embed"]), Tokens()
    prepared = defense.prepare(plain)
    images = torch.rand(n, 1, 6, 6, generator=generator)
    masks = defense.transform_batch(Batch(images, torch.arange(n) % 5), prepared, generator).masks
    found = torch.func.functional_call(prepared, dict(masks), (images,))
    by_hand = [plain(image * mask).squeeze(0) for image, mask in zip(images, masks["embed.dropout_mask"], strict=True)]
    torch.testing.assert_close(found, torch.stack(by_hand))
    torch.testing.assert_close(prepared(images), plain(images))


def test_a_layer_that_takes_the_tokens_of_all_examples_is_refused(generator: torch.Generator) -> None:
    defense = NetworkDropout(0.5, ["embed"])
    prepared = defense.prepare(Tokens(flattened=True))
    images = torch.rand(3, 1, 6, 6, generator=generator)
    masks = defense.transform_batch(Batch(images, torch.arange(3)), prepared, generator).masks
    with pytest.raises(UnsupportedModelError, match=r"inputs \(n, \.\.\., 6\) of the 3 examples; got \(18, 6\)"):
        torch.func.functional_call(prepared, dict(masks), (images,))


def test_rate(model: Backbone, generator: torch.Generator) -> None:
    defense = NetworkDropout(0.3)
    many = Batch(torch.zeros(2000, 1, 6, 6), torch.zeros(2000, dtype=torch.int64))
    (mask,) = defense.transform_batch(many, defense.prepare(model), generator).masks.values()
    assert mask.shape == (2000, 54)
    assert abs(float((mask == 0).double().mean()) - 0.3) < 4 * math.sqrt(0.3 * 0.7 / mask.numel())
    assert abs(float(mask.mean()) - 1) < 4 * math.sqrt(0.3 / 0.7 / mask.numel())


def test_one_example_gives_its_mask_away(
    model: Backbone, gradient_of: GradientOf, batch: Batch, generator: torch.Generator
) -> None:
    defense = NetworkDropout(0.5)
    prepared = defense.prepare(model)
    one = batch.examples(0, 1)
    released = defended_gradient(defense, prepared, gradient_of(prepared), one, generator)
    with torch.no_grad():
        for name, buffer in defense.simulate_buffers(dict(prepared.named_buffers()), released, 1).items():
            prepared.get_buffer(name).copy_(buffer)
    simulated = gradient_of(prepared)(one)
    for name, value in released.items():
        torch.testing.assert_close(simulated[name], value, rtol=1e-9, atol=1e-12)


def test_several_examples_leave_an_expectation(model: Backbone) -> None:
    defense = NetworkDropout(0.5)
    observed = {"head.weight": torch.ones(5, 54)}
    observed["head.weight"][:, 7] = 0
    buffers = dict(defense.prepare(model).named_buffers())
    mask = defense.simulate_buffers(buffers, observed, 3)["head.dropout_mask"]
    assert mask[0, 7] == 0
    torch.testing.assert_close(mask[0, 0], torch.tensor(1 / (1 - 0.5**3)))
    assert NetworkDropout().simulate_buffers(buffers, observed, 3) is buffers


@pytest.mark.parametrize("n", [1, 3])
def test_a_gradient_that_was_not_released_tells_of_no_input(
    model: Backbone, gradient_of: GradientOf, batch: Batch, generator: torch.Generator, n: int
) -> None:
    dropout = NetworkDropout(0.5)
    defense, prepared = Chain([dropout, ExcludedVariables(["head.weight"])]), dropout.prepare(model)
    released = defended_gradient(defense, prepared, gradient_of(prepared), batch.examples(0, n), generator)
    assert released["trunk.layers.0.weight"].any()
    buffers = dict(prepared.named_buffers())
    found = defense.simulate_buffers(buffers, released, n)
    torch.testing.assert_close(found, buffers)
    stacked = {name: value.expand(2, *value.shape) for name, value in released.items()}
    mapped = torch.func.vmap(lambda seen: defense.simulate_buffers(buffers, seen, n)["head.dropout_mask"])(stacked)
    torch.testing.assert_close(mapped, buffers["head.dropout_mask"].expand(2, 1, 54))


def test_noise_hides_the_mask(
    model: Backbone, gradient_of: GradientOf, batch: Batch, generator: torch.Generator
) -> None:
    chain = Chain([NetworkDropout(0.5), GaussianNoise(1e-4)])
    prepared = chain.prepare(model)
    released = defended_gradient(chain, prepared, gradient_of(prepared), batch.examples(0, 1), generator)
    buffers = dict(prepared.named_buffers())
    torch.testing.assert_close(chain.simulate_buffers(buffers, released, 1), buffers)


def test_rates_that_often_drop_no_input_leave_the_mask_exact(model: Backbone) -> None:
    defense = NetworkDropout(0.05)
    buffers = dict(defense.prepare(model).named_buffers())
    found = defense.simulate_buffers(buffers, {"head.weight": torch.ones(5, 54)}, 1)
    torch.testing.assert_close(found["head.dropout_mask"], torch.full((1, 54), 1 / 0.95))


def test_unknown_and_repeated_layers_are_refused(model: Backbone) -> None:
    with pytest.raises(UnsupportedModelError, match=r"'tail'.*\['head'\]"):
        NetworkDropout(0.5, ["tail"]).prepare(model)
    normed = copy.deepcopy(model)
    weight_norm(normed.head)
    with pytest.raises(UnsupportedModelError, match=r"'head' with a weight of its own, .* the model has \[\]"):
        NetworkDropout(0.5).prepare(normed)
    defense = NetworkDropout(0.5)
    with pytest.raises(ConfigError, match="already"):
        defense.prepare(defense.prepare(model))
