"""Inputs of inner linear layers by linear programs: exact or not at all, with labels and scale."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lit_recon.attacks.updates import (
    Adam,
    FeaturesOnly,
    GradientMatching,
    InputMatching,
    KnownLabels,
    NonNegativeInputs,
    Pixels,
)
from lit_recon.attacks.updates.features import inputs as module
from lit_recon.attacks.updates.features.inputs import LayerInputs, rectified_layer
from lit_recon.clients import Client, ClientSettings, LocalTraining
from lit_recon.defenses import Defense, GaussianNoise, GradientPruning
from lit_recon.errors import ConfigError, ThreatModelError, UnsupportedModelError
from lit_recon.records import Knowledge, Normalization, Observation
from tests.attacks.updates.feature_maps.patch_victims import two_clients

SHAPE = (1, 12, 12)


def network(activation: nn.Module | None = None, neurons: int = 64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3),
        activation or nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(200, neurons),
        activation or nn.ReLU(),
        nn.Linear(neurons, 10),
    )


def batch(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(n, 1, 6, 6, generator=generator)
    images = nn.functional.interpolate(coarse, size=SHAPE[1:], mode="bilinear").clamp(0, 1)
    return images, torch.randint(10, (n,), generator=generator)


def client(model: nn.Module | None = None, defense: Defense | None = None) -> Client:
    norm = Normalization((0.5,), (0.25,))
    return Client(model or network(), defense=defense, image_shape=SHAPE, normalization=norm)


def observed(n: int, seed: int = 0, defense: Defense | None = None, model: nn.Module | None = None) -> Observation:
    return client(model, defense).observe(*batch(n, seed), Knowledge(labels=False))


def true_inputs(seen: Observation, n: int, seed: int = 0) -> Tensor:
    with torch.no_grad():
        return LayerInputs(seen, "4")(batch(n, seed)[0]).double()


def errors(found: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """Relative distance to the nearest true input, and which one that is."""
    distances = torch.cdist(found, truth) / truth.norm(dim=1)
    return distances.min(dim=1).values, distances.argmin(dim=1)


@pytest.mark.parametrize("n", [1, 2, 4, 8, 12])
def test_all_inputs_are_found_with_scale_and_labels(n: int) -> None:
    seen = observed(n)
    found = NonNegativeInputs()(seen)
    assert found.layer == "4"
    distance, which = errors(found.inputs, true_inputs(seen, n))
    assert sorted(which.tolist()) == list(range(n))
    assert float(distance.max()) < 1e-4  # 1e-7 at the time of writing
    assert found.labels is not None
    assert torch.equal(found.labels, batch(n)[1][which])


@pytest.mark.parametrize("seed", range(4))
def test_no_mixture_is_taken_for_an_input(seed: int) -> None:
    """Where there are too many images to find all."""
    n = 40
    seen = observed(n, seed)
    try:
        found = NonNegativeInputs(starts=60)(seen)
    except UnsupportedModelError:
        return
    distance, _ = errors(found.inputs, true_inputs(seen, n, seed))
    assert float(distance.max()) < 1e-3


def enlarging(channels: int, *layers: nn.Module) -> nn.Module:
    """Every map is enlarged to 6 x 6, with more copies of its numbers than of a vertex's other zeros."""
    torch.manual_seed(0)
    convolution = nn.Conv2d(1, channels, 3), nn.ReLU(), nn.Sequential(*layers), nn.Flatten()
    return nn.Sequential(*convolution, nn.Linear(channels * 36, 64), nn.ReLU(), nn.Linear(64, 10))


def test_zeros_of_entries_that_repeat_prove_nothing() -> None:
    """Vertices with few zeros, each of them nine times; two mixtures were called inputs."""
    seen = observed(4, model=enlarging(16, nn.AdaptiveAvgPool2d(2), nn.AdaptiveAvgPool2d(6)))
    with pytest.raises(UnsupportedModelError, match="no input of 4 was found: none of 12 vertices has 11 zeros"):
        NonNegativeInputs(starts=12)(seen)


@pytest.mark.parametrize(("std", "least", "largest"), [(0.0, 8, 1e-4), (1e-6, 4, 1e-3)])
def test_inputs_with_entries_that_repeat_are_found(std: float, least: int, largest: float) -> None:
    model = enlarging(24, nn.MaxPool2d(3), nn.Upsample(scale_factor=2))
    seen = observed(8, defense=GaussianNoise(std) if std else None, model=model)
    found = NonNegativeInputs(starts=60)(seen)
    distance, which = errors(found.inputs, true_inputs(seen, 8))
    assert len(set(which.tolist())) == len(which) >= least
    assert float(distance.max()) < largest
    assert "repetitions of others not counted" in found.notes[0]


def test_vectors_that_share_their_zeros_with_others_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = observed(24)
    truth = true_inputs(seen, 24)
    assert float(errors(NonNegativeInputs(starts=60)(seen).inputs, truth)[0].max()) < 1e-3
    monkeypatch.setattr(module, "_ALONE", 0.0)
    monkeypatch.setattr(module, "_EXCESS", -30)
    assert float(errors(NonNegativeInputs(starts=60)(seen).inputs, truth)[0].max()) > 0.05


@pytest.mark.parametrize("lr", [0.01, 0.1])
def test_rounding_of_released_weights_does_no_harm(lr: float) -> None:
    """A difference of weights in single precision holds a gradient with few digits."""
    n = 8
    seen = observed(n)
    rounded = {}
    for name, value in seen.update.items():
        before = seen.parameters[name]
        rounded[name] = (before - (before - lr * value)) / lr
    found = NonNegativeInputs()(replace(seen, update=rounded))
    distance, which = errors(found.inputs, true_inputs(seen, n))
    assert sorted(which.tolist()) == list(range(n))
    assert float(distance.max()) < 5e-3  # 2e-4 at the time of writing
    assert torch.equal(found.labels, batch(n)[1][which])  # type: ignore[arg-type]  # found


@pytest.mark.parametrize(("n", "std"), [(1, 0.0), (1, 1e-5), (4, 0.0), (4, 1e-6)])
def test_the_note_says_how_exactly_inputs_are_known(n: int, std: float) -> None:
    seen = observed(n, defense=GaussianNoise(std) if std else None)
    found = NonNegativeInputs(starts=100)(seen)
    [note] = found.notes
    assert ("known up to rounding" in note) == (std == 0)
    assert ("are needed" in note) == (n > 1)  # one input is alone in its span
    if std:
        truth = true_inputs(seen, n)[errors(found.inputs, true_inputs(seen, n))[1]]
        error = float(((found.inputs - truth).square().mean(1).sqrt() / truth.amax(1)).max())
        told = float(note.split("an error of about ")[1].split(" of their")[0])
        assert error == pytest.approx(told, rel=0.5)  # measured 1e-5, 9e-6


def test_weights_towards_zeros_find_more() -> None:
    seen = observed(16)
    counts = []
    for reweightings in (0, 5):
        try:
            counts.append(len(NonNegativeInputs(40, reweightings)(seen).inputs))
        except UnsupportedModelError:
            counts.append(0)
    assert counts[1] > counts[0]


def test_images_are_those_of_their_labels() -> None:
    """Candidate images carry labels; every one is asked for the input of an image with its label."""
    images, labels = batch(6)[0], torch.tensor([8, 3, 6, 5, 0, 1])
    seen = client().observe(images, labels)
    penalty = InputMatching().prepare(seen)
    assert float(penalty.penalty(images, penalty.targets(images, labels), 0.0)) < 1e-8
    reverse = labels.flip(0)
    targets = penalty.targets(images, reverse)
    order = torch.cdist(targets.double(), true_inputs(seen, 6)).argmin(dim=1)
    assert torch.equal(labels[order], reverse)


def test_clients_have_inputs_by_the_statistics_of_their_own_images() -> None:
    model, norm = network(), Normalization((0.5,), (0.25,))
    model[0] = nn.Sequential(model[0], nn.BatchNorm2d(8))  # type: ignore[index, operator]
    client = Client(model, "train", rule=two_clients, image_shape=SHAPE, normalization=norm)
    seen = client.observe(*batch(4), Knowledge(labels=True))
    distance, which = errors(NonNegativeInputs()(seen).inputs, true_inputs(seen, 4))
    assert sorted(which.tolist()) == [0, 1, 2, 3]
    assert float(distance.max()) < 1e-4  # with the statistics of all images 0.04


def test_inputs_without_a_gradient_of_the_bias_are_known_up_to_their_scales() -> None:
    model = network()
    model[4] = nn.Linear(200, 64, bias=False)  # type: ignore[index, operator]
    images, labels = batch(3)
    seen = client(model).observe(images, labels, Knowledge(labels=True))
    penalty = InputMatching().prepare(seen)
    assert "are known up to rounding" in penalty.notes[0]
    assert penalty.notes[0].endswith("; their scales are unknown, as no gradient of a bias tells them")
    assert penalty.recovered.labels is None  # the head's inputs depend on the scales
    order = torch.cdist(penalty.recovered.inputs, nn.functional.normalize(true_inputs(seen, 3))).argmin(dim=1)
    assert float(penalty.penalty(images[order], penalty.targets(images, labels), 0.0)) < 1e-8
    # the labels of a head depend on directions only
    head = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(200, 10, bias=False))
    seen = client(head).observe(images, labels, Knowledge(labels=False))
    found = NonNegativeInputs()(seen)
    assert found.labels is not None
    assert torch.equal(found.labels, labels[errors(found.inputs, nn.functional.normalize(true_inputs(seen, 3)))[1]])


def test_candidates_come_to_the_inputs() -> None:
    seen = client().observe(*batch(4), Knowledge(labels=True))
    solver = Adam(lr=0.05, signed=False)
    attack = GradientMatching(FeaturesOnly(), [], Pixels(), solver, KnownLabels(), InputMatching(), steps=150)
    found = attack(seen)
    truth = true_inputs(seen, 4)
    with torch.no_grad():
        reached = LayerInputs(seen, "4")(found.images).double()
    assert float(errors(reached, truth)[0].max()) < 0.2  # 0.03 at the time of writing
    assert any("inputs of the layer 4 are known up to rounding" in note for note in found.notes)


@pytest.mark.parametrize(
    ("seen", "error", "message"),
    [
        (lambda: observed(4, model=network(nn.GELU())), UnsupportedModelError, "outputs of a ReLU"),
        (lambda: observed(4, model=network(nn.Sigmoid())), UnsupportedModelError, "outputs of a ReLU"),
        (lambda: observed(20, model=network(neurons=16)), UnsupportedModelError, "fewer than neurons"),
        (lambda: observed(4, defense=GaussianNoise(1e-3)), ThreatModelError, "not spanned by 4 inputs"),
        (lambda: observed(4, defense=GradientPruning(0.5)), ThreatModelError, "not spanned by 4 inputs"),
        (lambda: observed(4, defense=GradientPruning(1.0)), ThreatModelError, "zero everywhere"),
    ],
)
def test_what_inputs_do_not_follow_from(seen: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        NonNegativeInputs()(seen())  # type: ignore[operator]  # a function


def local(n_clients: int = 1, **training: Any) -> Observation:
    settings = ClientSettings(local_steps=LocalTraining(**training), n_clients=n_clients)
    model = Client(network(), image_shape=SHAPE, normalization=Normalization((0.5,), (0.25,))).model
    return settings.client(model).observe(*batch(4), Knowledge(labels=False))


@pytest.mark.parametrize("n_clients", [1, 2])
def test_several_local_steps_are_refused(n_clients: int) -> None:
    with pytest.raises(ThreatModelError, match="several local steps"):
        NonNegativeInputs()(local(n_clients, steps=2, lr=1e-4))


@pytest.mark.parametrize("n_clients", [1, 2])
def test_one_local_step_is_one_gradient(n_clients: int) -> None:
    seen = local(n_clients, steps=1)
    distance, which = errors(NonNegativeInputs()(seen).inputs, true_inputs(seen, 4))
    assert sorted(which.tolist()) == [0, 1, 2, 3]
    assert float(distance.max()) < 5e-3


@pytest.mark.parametrize("n_clients", [1, 2])
def test_rates_of_the_layers_change_no_scale(n_clients: int) -> None:
    """A released difference holds the weight and the bias of a layer in units of their own rates."""
    seen = local(n_clients, steps=1, lr=1.0, release="difference", layer_lrs={"4.bias": 0.02, "6": 3.0})
    found = NonNegativeInputs()(seen)
    distance, which = errors(found.inputs, true_inputs(seen, 4))
    assert sorted(which.tolist()) == [0, 1, 2, 3]
    assert float(distance.max()) < 5e-3
    assert found.labels is not None
    assert torch.equal(found.labels, batch(4)[1][which])


def test_a_step_of_adam_is_no_gradient() -> None:
    with pytest.raises(ThreatModelError, match="this client's optimizer is Adam"):
        NonNegativeInputs()(local(steps=1, optimizer="adam"))


def test_the_layer_is_the_first_behind_a_rectifier() -> None:
    assert rectified_layer(observed(2)) == "4"


@pytest.mark.parametrize("how", [{"starts": 0}, {"reweightings": -1}])
def test_settings_out_of_range(how: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        NonNegativeInputs(**how)
    with pytest.raises(ConfigError):
        InputMatching(weight=-1.0)
