"""Weights that a model was trained to before are what all models begin at."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn import functional as F

from lit_recon.attacks.shadow import GradientDescent, Pretraining, ShadowPlan, pretrained_weights, train_models
from lit_recon.data import ImageSet, InformedSplitSettings
from lit_recon.data.sources import Digits
from lit_recon.errors import ConfigError
from lit_recon.experiments.released_attack.settings import ShadowSettings
from lit_recon.models.released import ReleasedMLP

FORTY = Pretraining(images=40, steps=30)


def settings(initialization: str | Pretraining = FORTY) -> ShadowSettings:
    split = InformedSplitSettings(fixed=20, shadow=30, targets=5)
    return ShadowSettings(split=split, descent=GradientDescent(steps=4), initialization=initialization)  # type: ignore[arg-type]


def test_pretraining_is_descent_with_momentum() -> None:
    torch.manual_seed(0)
    network = ReleasedMLP((1, 2, 2), 3, [4])
    images, labels = torch.rand(7, 1, 2, 2), torch.arange(7) % 3
    before = [parameter.detach().clone() for parameter in network.parameters()]
    weights = [parameter.double().requires_grad_() for parameter in before]
    speeds = [torch.zeros_like(weight) for weight in weights]
    for _ in range(5):
        hidden = F.elu(F.linear(images.double().flatten(1), *weights[:2]))
        loss = -F.linear(hidden, *weights[2:]).log_softmax(1)[torch.arange(7), labels].mean()
        gradients = torch.autograd.grad(loss, weights)
        speeds = [0.5 * speed + gradient for speed, gradient in zip(speeds, gradients, strict=True)]
        weights = [(w - 0.3 * v).detach().requires_grad_() for w, v in zip(weights, speeds, strict=True)]
    found = pretrained_weights(network, images, labels, Pretraining(7, 5, 0.3, 0.5))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.cat([weight.detach().flatten() for weight in weights]).float())
    assert all(map(torch.equal, before, network.parameters()))


def test_all_models_go_on_from_the_trained_weights() -> None:
    own = settings()
    split = own.drawn()
    plan, plain = own.plan(split), settings("known").plan(split)
    images = split.pretraining
    assert images is not None
    assert len(images) == 40
    loss = {}
    for name, one in (("trained", plan), ("random", plain)):
        weights = one.initial_weights()
        torch.nn.utils.vector_to_parameters(weights, one.network.parameters())
        loss[name] = float(F.cross_entropy(one.network(images.pixels()), images.labels).detach())
    assert loss["trained"] < 0.5 * loss["random"]  # measured 0.29 of 2.4
    assert torch.equal(plan.starts(range(3)), plan.initial_weights())
    members, reference = range(3), plan.reference()
    trained = plan.train(split.shadow, members, "loop", reference)
    first = split.shadow.subset(torch.arange(3))
    again = train_models(plan.known, plan.initial_weights(), first.pixels(), first.labels, "batched_mlp")
    torch.testing.assert_close(trained, (again.double() - reference).float(), rtol=1e-3, atol=1e-6)
    # A store belongs to the weights that its models began at, and the same settings give the same weights.
    assert plan.description != plain.description
    assert settings().plan(own.drawn()).description == plan.description


def test_known_weights_are_not_changed_by_who_uses_them(plan: ShadowPlan, shadows: ImageSet) -> None:
    start = torch.linspace(-0.5, 0.5, plan.known.n_parameters)
    own = dataclasses.replace(plan, start=start.clone())
    own.initial_weights().zero_()
    assert torch.equal(own.initial_weights(), start)
    assert not torch.equal(own.initial_weights("other", 0), start)
    assert own.train(shadows, range(2), "loop", own.reference()).shape == (2, len(start))


def test_a_split_without_images_for_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="initialization.images are not set aside"):
        settings().plan(settings("known").drawn())
    with pytest.raises(ConfigError, match="pre-training needs 1800 images .* got 1742"):
        settings(Pretraining(images=1800)).drawn()
    assert settings(Pretraining(images=1742)).drawn().rest is None


def test_a_diverging_training_is_named() -> None:
    own = settings(Pretraining(images=40, steps=50, lr=1e300))
    with pytest.raises(ConfigError, match=r"lower initialization.lr=1e\+300"):
        own.plan(own.drawn())


@pytest.mark.parametrize("change", [{"images": 0}, {"steps": 0}, {"lr": 0.0}, {"momentum": 1.0}])
def test_numbers_out_of_range_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="initialization.images and initialization.steps must be at least 1"):
        Pretraining(**change)  # type: ignore[arg-type]


def test_digits_are_left_for_it() -> None:
    split = settings().drawn()
    assert split.rest is not None
    assert len(split.rest) == len(Digits().load()[0]) + len(Digits().load()[1]) - 20 - 30 - 5 - 40
