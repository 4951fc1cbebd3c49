"""Unknown training images are found by repeating the training, and what is certified is true."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from lit_recon.attacks.anderson import Anderson
from lit_recon.attacks.trainset import repeated
from lit_recon.attacks.trainset.base import Candidates, ReleasedModel
from lit_recon.attacks.trainset.repeated import MarkedImages, RepeatedTraining
from lit_recon.attacks.trainset.subspace import first_layer
from lit_recon.attacks.trainset.training import Training
from lit_recon.errors import ConfigError, ThreatModelError, UnsupportedModelError
from lit_recon.models.centered import CenteredMLP
from lit_recon.privacy.noisy_sgd import PrivateDescent

SHAPE, N, U = (1, 3, 3), 10, 2
TRAINING = Training("multiclass", steps=6, lr=0.1, momentum=0.5)


def victim(training: Training = TRAINING, u: int = U) -> tuple[ReleasedModel, Tensor, Tensor]:
    """A released model, its unknown images `(u, 1, 3, 3)` and their labels."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(N, *SHAPE, generator=generator, dtype=torch.float64)
    labels = torch.arange(N) % 3
    mean = torch.full(SHAPE, 0.5)
    model = CenteredMLP(SHAPE, 3, hidden=(8,), activation="tanh", initial_std=None, mean=mean).double()
    model.initialize(generator)
    start = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    seen = ReleasedModel(
        model=model,
        weights=training.run(model, images, labels, start).weights,
        task="multiclass",
        image_shape=SHAPE,
        n_classes=3,
        mean=mean.double(),
        n_examples=N,
        training=training,
        start=start,
        known_images=images[: N - u],
        known_labels=labels[: N - u],
    )
    return seen, images[N - u :], labels[N - u :]


def grey(seen: ReleasedModel, labels: Tensor) -> Candidates:
    return Candidates(seen, seen.mean.expand(len(labels), *SHAPE), labels)


def rmse(found: Tensor, images: Tensor) -> float:
    return float((found - images).square().mean().sqrt())


def test_descent_finds_all_unknown_images_from_grey_ones() -> None:
    seen, images, labels = victim()
    found = RepeatedTraining(steps=25)(grey(seen, labels))
    assert found.certified is not None
    assert found.certified.all()
    assert found.loss <= 1e-3
    assert rmse(found.images, images) < 1e-3  # measured: 1.4e-4


def test_anderson_finds_one_from_a_grey_image_and_several_from_near_the_truth() -> None:
    seen, images, labels = victim(u=1)
    found = RepeatedTraining(steps=8, method="anderson")(grey(seen, labels))
    assert found.certified is not None
    assert found.certified.all()
    assert rmse(found.images, images) < 1e-3  # measured: 3.2e-7
    seen, images, labels = victim()
    near = (images + 0.02 * torch.randn(images.shape, generator=torch.Generator().manual_seed(1))).clamp(0, 1)
    found = RepeatedTraining(steps=8, method="anderson")(Candidates(seen, near, labels))
    assert found.certified is not None
    assert found.certified.all()
    assert rmse(found.images, images) < 1e-3  # measured: 3.3e-6


def test_nothing_is_certified_before_the_weights_agree() -> None:
    seen, images, labels = victim()
    found = RepeatedTraining(steps=2)(grey(seen, labels))
    assert found.certified is not None
    assert not found.certified.any()
    assert rmse(found.images, images) > 0.01
    wrong = replace(seen, known_images=1 - seen.known_images if seen.known_images is not None else None)
    found = RepeatedTraining(steps=5)(grey(wrong, labels))
    assert found.certified is not None
    assert not found.certified.any()


def test_more_pixels_than_weights_are_never_certified() -> None:
    training = replace(TRAINING, steps=1)
    seen, images, labels = victim(training, u=N)
    small = CenteredMLP(SHAPE, 3, hidden=(), initial_std=None).double()
    start = {name: weight.detach().clone() for name, weight in small.named_parameters()}
    weights = training.run(small, images, labels, start).weights
    seen = replace(seen, model=small, start=start, weights=weights, known_images=None, known_labels=None)
    found = RepeatedTraining(steps=1)(Candidates(seen, images, labels))
    assert found.loss < 1e-12
    assert found.certified is not None
    assert not found.certified.any()


def test_an_image_of_little_effect_is_not_certified_with_another() -> None:
    """A wrong image in the place of one that the model gives its right label already; the other one is true."""
    from sklearn.datasets import load_digits

    raw, digits = load_digits(return_X_y=True)
    chosen = digits < 2
    images, labels = torch.tensor(raw[chosen]).view(-1, 1, 8, 8) / 16, torch.tensor(digits[chosen])
    model = CenteredMLP((1, 8, 8), 1, hidden=(16,), initial_std=None).double()
    model.initialize(torch.Generator().manual_seed(0))
    start = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    start = Training("binary", steps=300, lr=1.0).run(model, images[200:], labels[200:], start).weights
    margins = functional_call(model, start, (images[:200],))[:, 0] * (2 * labels[:200] - 1)
    order = margins.argsort()
    labels[order[0]] = 1 - labels[order[0]]
    own = order[[*range(-6, 0), 0, 30]]
    training = Training("binary", steps=3, lr=0.1)
    seen = ReleasedModel(
        model=model,
        weights=training.run(model, images[own], labels[own], start).weights,
        task="binary",
        image_shape=(1, 8, 8),
        n_classes=2,
        mean=images.mean(dim=0),
        n_examples=8,
        training=training,
        start=start,
        known_images=images[own[:6]],
        known_labels=labels[own[:6]],
    )
    wrong = order[labels[order] == labels[own[-1]]][-1]
    found = RepeatedTraining(steps=1)(Candidates(seen, images[torch.stack([own[-2], wrong])], labels[own[-2:]]))
    assert found.loss < 1e-3  # measured: 1.9e-4
    assert rmse(found.images[1], images[own[-1]]) > 0.2
    assert found.certified is not None
    assert found.certified.tolist() == [True, False]


class Pooled(nn.Module):
    """A network that does not see all pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.AvgPool2d(3), nn.Flatten(), nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layers(images)
        return logits


def test_pixels_that_the_network_does_not_see_are_not_certified() -> None:
    seen, images, labels = victim(u=1)
    model = Pooled().double()
    start = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    every, every_label = seen.with_known(images, labels)
    seen = replace(seen, model=model, start=start, weights=TRAINING.run(model, every, every_label, start).weights)
    alike = images.mean().expand(1, *SHAPE)
    found = RepeatedTraining(steps=1)(Candidates(seen, alike, labels))
    assert found.loss < 1e-6
    assert found.certified is not None
    assert not found.certified.any()
    assert "none is certified: the attack needs a linear layer on all 9 pixels" in found.notes[0]


@pytest.mark.parametrize(
    "training",
    [
        TRAINING,
        replace(TRAINING, weight_decay=0.1),
        replace(TRAINING, objective="log_loss", momentum=0.0),
        replace(TRAINING, parts=3),
        replace(TRAINING, until=1.05),
    ],
)
def test_unrolled_weights_are_those_of_the_training_and_differentiable(training: Training) -> None:
    seen, images, labels = victim(training, u=N)
    assert seen.start is not None
    images.requires_grad_()
    found = training.unrolled(seen.model, images, labels, seen.start)
    for name, weight in seen.weights.items():
        torch.testing.assert_close(found[name].detach(), weight, rtol=1e-12, atol=1e-12)
    sums = [weight.sum() for weight in found.values()]
    slope = torch.autograd.grad(torch.stack(sums).sum(), images)[0]
    direction, size = torch.randn(images.shape, generator=torch.Generator().manual_seed(2)).double(), 1e-5
    ends = [
        sum(float(weight.sum()) for weight in training.run(seen.model, at, labels, seen.start).weights.values())
        for at in (images.detach() - size * direction, images.detach() + size * direction)
    ]
    assert float((slope * direction).sum()) == pytest.approx((ends[1] - ends[0]) / (2 * size), rel=1e-6)


@pytest.mark.parametrize("training", [TRAINING, replace(TRAINING, weight_decay=0.1, parts=2)])
def test_coefficients_times_images_are_what_the_training_adds_to_the_first_layer(training: Training) -> None:
    seen, images, labels = victim(training, u=N)
    name, _, scale = first_layer(seen)
    layer, candidates = seen.model.get_submodule(name), Candidates(seen, images, labels)
    assert isinstance(layer, nn.Linear)
    assert seen.start is not None
    marked = MarkedImages(seen.model, layer, candidates)
    weights = {f"model.{key}": weight for key, weight in seen.start.items()}
    weights["coefficients"] = torch.zeros(N + 1, 8, dtype=torch.float64)
    trained = training.run(marked, marked.mark(images), labels, weights).weights
    torch.testing.assert_close(trained[f"model.{name}.weight"], seen.weights[f"{name}.weight"])
    torch.testing.assert_close(scale, torch.ones(9, dtype=torch.float64))
    added = trained["coefficients"][:-1].T @ (images - seen.mean).flatten(1)
    decayed = {key: torch.zeros_like(weight) for key, weight in weights.items()}
    decayed[f"model.{name}.weight"] = weights[f"model.{name}.weight"]
    kept = _without_loss(training, weights[f"model.{name}.weight"])
    torch.testing.assert_close(trained[f"model.{name}.weight"], kept + added)


def _without_loss(training: Training, weight: Tensor) -> Tensor:
    """What weight decay alone leaves of a weight."""
    parameter = nn.Parameter(weight.clone())
    optimizer = torch.optim.SGD(
        [parameter], lr=training.lr, momentum=training.momentum, weight_decay=training.weight_decay
    )
    for _ in range(training.steps):
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize("method", ["descent", "anderson"])
def test_an_interrupted_search_ends_with_the_same_bits(method: str) -> None:
    seen, _, labels = victim()
    attack = RepeatedTraining(steps=6, method=method)  # type: ignore[arg-type]  # a name in a table
    noise = torch.rand(U, *SHAPE, generator=torch.Generator().manual_seed(3)).double()
    whole = attack.begin([Candidates(seen, noise, labels)])
    first, second = (attack.begin([Candidates(seen, noise, labels)]) for _ in range(2))
    for _ in range(3):
        first.advance()
    assert first.state is not None
    assert second.state is not None
    second.state.load_state_dict(first.state.state_dict())
    ends = [run.finish()[0] for run in (whole, second)]
    assert torch.equal(ends[0].images, ends[1].images)
    assert ends[0].loss == ends[1].loss


def test_missing_knowledge_is_named() -> None:
    seen, _, labels = victim()
    private = replace(TRAINING, dp=PrivateDescent(noise_multiplier=1.0))
    for changes, message in (
        ({"training": None}, "needs the training"),
        ({"start": None}, "needs the initial weights"),
        ({"training": private}, "clipping and noise are not simulated"),
        ({"n_examples": 11}, "give 3 candidates"),
    ):
        with pytest.raises(ThreatModelError, match=message):
            RepeatedTraining().check(grey(replace(seen, **changes), labels))  # type: ignore[arg-type]  # a table
    with pytest.raises(ConfigError, match="with dp cannot be repeated"):
        private.unrolled(seen.model, seen.mean[None], labels[:1], seen.weights)


@pytest.mark.parametrize("u", [U, N - 1])
def test_distances_are_relative_to_the_effect_of_the_unknown_images_in_their_parts(u: int) -> None:
    seen, _, labels = victim(replace(TRAINING, momentum=0.0, parts=3), u)
    others = seen.start
    order = torch.randperm(N, generator=torch.Generator().manual_seed(0))
    for part in order.tensor_split(3) if u == U else ():  # a single known image is in one part alone
        own = part[part < N - u]
        assert len(own) >= 1
        assert seen.known_images is not None
        assert seen.known_labels is not None
        assert others is not None
        phase = replace(TRAINING, momentum=0.0, steps=2)
        others = phase.run(seen.model, seen.known_images[own], seen.known_labels[own], others).weights
    assert others is not None
    effect = sum(float((others[name] - weight).square().sum()) for name, weight in seen.weights.items()) ** 0.5
    assert float(RepeatedTraining().init(grey(seen, labels))["scale"]) == pytest.approx(effect, rel=1e-10)


@pytest.mark.parametrize("method", ["descent", "anderson"])
def test_images_without_an_effect_are_not_sought(method: str) -> None:
    seen, _, labels = victim()
    assert seen.start is not None
    assert seen.known_images is not None
    assert seen.known_labels is not None
    others = TRAINING.run(seen.model, seen.known_images, seen.known_labels, seen.start).weights
    attack = RepeatedTraining(steps=1, method=method)  # type: ignore[arg-type]  # a name in a table
    with pytest.raises(ThreatModelError, match="left no trace in this model"):
        attack(grey(replace(seen, weights=others), labels))


def test_anderson_keeps_its_memory_on_the_device_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, _, labels = victim()
    start, there = grey(seen, labels), torch.device("meta")  # no GPU is needed to ask for another device
    object.__setattr__(seen, "weights", {name: weight.to(there) for name, weight in seen.weights.items()})
    monkeypatch.setattr(repeated, "_scale", lambda start: 1.0)
    state = RepeatedTraining(method="anderson").init(start)
    memory, rows = state["memory"], torch.zeros(1, U * 9, dtype=torch.float64, device=there)
    for _ in range(2):
        assert memory.next(rows, rows, state["damping"]).device == there
        memory.forget(torch.ones_like(state["damping"], dtype=torch.bool))
    memory.load_state_dict(Anderson(1, U * 9, 50).state_dict())
    assert memory.next(rows, rows, state["damping"]).device == there


def test_anderson_needs_a_first_layer_on_pixels() -> None:
    seen, _, labels = victim()
    squared = nn.Sequential(nn.Flatten(), nn.Softplus(), nn.Linear(9, 3)).double()
    start = {name: weight.detach() for name, weight in squared.named_parameters()}
    other = replace(seen, model=squared, weights=start, start=start)
    with pytest.raises(UnsupportedModelError, match="needs a linear layer on all"):
        RepeatedTraining(method="anderson").check(grey(other, labels))
    RepeatedTraining().check(grey(other, labels))


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"memory": 0}, {"tolerance": 0.1}, {"certain": 1.0}, {"method": "x"}])
def test_wrong_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="must be"):
        RepeatedTraining(**wrong)  # type: ignore[arg-type]  # a table of settings
