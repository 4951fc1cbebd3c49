"""Maps and images from the last layer to the first, where few entries of an update are left."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from lit_recon.attacks.updates import (
    LBFGS,
    FeaturesOnly,
    GradientMatching,
    MatchingState,
    Pixels,
    TopDownMatching,
    TotalVariation,
)
from lit_recon.attacks.updates.feature_maps import top_down
from lit_recon.attacks.updates.feature_maps.partial_gradient import MapEstimate
from lit_recon.attacks.updates.feature_maps.top_down import TopDown
from lit_recon.attacks.updates.feature_maps.top_down_matching import TopDownPenalty
from lit_recon.attacks.updates.gradient_matching.priors import Penalty
from lit_recon.clients.client import Client
from lit_recon.defenses import Defense, GaussianNoise, GradientDropout, GradientPruning
from lit_recon.errors import ConfigError, ThreatModelError, UnsupportedModelError
from lit_recon.models import Backbone, WideFeatureLayer
from lit_recon.models.classifiers.networks import ResNet18
from lit_recon.records import Knowledge, Normalization, Observation

SIDE = 16
LABEL = torch.tensor([2])


def network(activation: str = "relu", norm: str = "batch") -> Backbone:
    """ResNet-18 of a quarter of its width with a wide layer, and statistics that images have about."""
    torch.manual_seed(0)
    trunk = ResNet18((3, SIDE, SIDE), norm=norm, activation=activation, width=16)  # type: ignore[arg-type]
    layer = WideFeatureLayer(trunk.out_features, 1024, 512, activation="gelu")
    model = Backbone(trunk, 5, Normalization((0.5,) * 3, (0.25,) * 3), layer)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    with torch.no_grad():
        model.train()(torch.rand(32, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(5)))
    return model.eval()


def observed(image: Tensor, defense: Defense, model: Backbone | None = None, mode: str = "eval") -> Observation:
    client = Client(model or network(), mode, defense=defense)  # type: ignore[arg-type]
    return client.observe(image, LABEL, Knowledge(), torch.Generator().manual_seed(0))


@pytest.fixture
def image(photographs: Tensor) -> Tensor:
    return photographs[:1, :, ::2, ::2].contiguous()


def searching(seen: Observation) -> tuple[TopDownPenalty, TopDown]:
    """The penalty before the label is known, and the search, whose network has the features."""
    penalty = TopDownMatching().prepare(seen)
    search = TopDown(seen, penalty.network, LABEL)
    center = seen.model.get_buffer("feature_layer.center").double()
    length = search.length(center, penalty.direction)
    assert length is not None
    penalty.network.features = center + length * penalty.direction
    return penalty, search


@pytest.fixture
def small_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers with maps of at most 4x4 are solved: the others take a minute."""
    monkeypatch.setattr(top_down, "LARGEST", 16)


@pytest.fixture
def seen(image: Tensor) -> Observation:
    return observed(image, GradientDropout(0.9))


def far(found: Tensor, truth: Tensor) -> float:
    return float((found - truth).norm() / truth.norm())


@pytest.mark.parametrize("defense", [GradientPruning(0.8), GradientDropout(0.9)])
def test_features_have_their_length(image: Tensor, defense: Defense) -> None:
    found = searching(observed(image, defense))[0].network.features
    assert found is not None
    with torch.no_grad():
        truth = network().trunk((image - 0.5) / 0.25)[0].double()
    assert far(found, truth) < 1e-4


def test_derivatives_behind_the_true_maps_are_those_of_the_gradient(image: Tensor, seen: Observation) -> None:
    penalty, search = searching(seen)
    maps = penalty.network.activations(image)
    active = {number: (one > 0).double() for number, one in enumerate(maps)}
    assert len(penalty.network.steps) == 16
    for step in penalty.network.steps:
        derivative = penalty.network.derivative(step, active, maps, LABEL) * active[step.relu]
        weight = f"{step.convolution.name}.weight"
        fitted = torch.nn.grad.conv2d_weight(
            maps[step.before][None],
            seen.parameters[weight].shape,
            derivative[None],
            stride=step.convolution.stride,
            padding=step.convolution.padding,
        )
        kept = seen.update[weight] != 0
        torch.testing.assert_close(fitted[kept], seen.update[weight][kept].double(), rtol=1e-3, atol=1e-6)
        sums = search._sums(step)
        assert sums is not None
        known = sums != 0
        torch.testing.assert_close(derivative.sum((1, 2))[known], sums[known], rtol=1e-3, atol=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("small_maps")
def test_maps_are_found_from_a_tenth_of_the_gradient_and_a_gray_image(image: Tensor, seen: Observation) -> None:
    penalty, search = searching(seen)
    found, truth = search.descend(), penalty.network.activations(image)
    gray = penalty.network.activations(torch.full_like(image, 0.5))
    assert {15, 14, 13, 12} <= found.maps.keys()
    errors = {number: far(found.maps[number].values, truth[number]) for number in (15, 14, 13, 12)}
    # 3e-7, 5e-4, 2e-3 and 0.03 were measured
    assert max(errors[number] for number in (15, 14, 13)) < 0.02
    assert errors[12] < 0.2
    assert min(far(gray[number], truth[number]) for number in errors) > 0.5


@pytest.mark.usefixtures("small_maps")
@pytest.mark.parametrize("number", [0, 1, -1])
def test_a_convolution_without_gradient_is_passed_over(
    seen: Observation, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, few in (("_ROUNDS", 2), ("_ITERATIONS", 5)):  # how close the maps come does not matter here
        monkeypatch.setattr(top_down, name, few)
    steps = searching(seen)[1].steps
    name = f"{steps[number].convolution.name}.weight"
    gone = replace(seen, update={**seen.update, name: torch.zeros_like(seen.update[name])})
    found = searching(gone)[1].descend()
    assert len(found.maps) > 1
    assert all(bool(part.isfinite().all()) for one in found.maps.values() for part in one)


@pytest.mark.usefixtures("small_maps")
def test_maps_around_an_image_that_is_near_are_nearer(image: Tensor) -> None:
    seen = observed(image, GradientDropout(0.7))
    penalty, search = searching(seen)
    near = image + 0.003 * torch.randn(image.shape, generator=torch.Generator().manual_seed(1))
    found, guess, truth = search.around(near), penalty.network.activations(near), penalty.network.activations(image)
    for number in (15, 14, 13):
        assert far(found.maps[number].values, truth[number]) < 0.2 * far(guess[number], truth[number])


@pytest.mark.slow
@pytest.mark.usefixtures("small_maps")
def test_candidates_near_the_image_get_its_maps(image: Tensor) -> None:
    seen = observed(image, GradientDropout(0.7))
    near = image + 0.02 * torch.randn(image.shape, generator=torch.Generator().manual_seed(1))
    attack = GradientMatching(
        FeaturesOnly(),
        [TotalVariation(0.01)],
        Pixels(box=False),
        LBFGS(inner=40, history=40),
        features=TopDownMatching(begins=0.01),
        steps=5,
    )
    run = attack.begin([seen])
    assert isinstance(run.state, MatchingState)
    (problem,) = run.state.problems
    problem.variables["pixels"].data.copy_(attack.parametrization.of(near, seen)["pixels"])
    problem.feature_penalty = replace(checked(problem.feature_penalty), begins=0.0)
    (found,) = run.finish()
    assert torch.equal(found.labels, LABEL)  # not the first guess from what is left of the head's gradient
    assert found.certified is None
    of = checked(problem.feature_penalty).network.activations
    before, after = (
        [far(of(one)[number], of(image)[number]) for number in (15, 14, 13)] for one in (near, found.images)
    )
    assert max(after) < 0.3 * min(before)
    assert "1 - cos between the update of the images and the observed entries" in found.notes[-1]


def checked(penalty: Penalty | None) -> TopDownPenalty:
    assert isinstance(penalty, TopDownPenalty)
    return penalty


def test_the_true_image_has_no_penalty(image: Tensor, seen: Observation) -> None:
    penalty, _ = searching(seen)
    truth = penalty.network.activations(image)
    maps = {number: MapEstimate(truth[number], torch.full_like(truth[number], 1e-6)) for number in (9, 12, 15)}
    whole = replace(penalty, maps=maps)
    with torch.no_grad():
        at = [float(whole.penalty(one, torch.zeros(()), 0.5)) for one in (image, image + 0.01)]
    assert at[0] < 1e-8 < 1e-4 < at[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("activation", "norm", "defense", "words"),
    [
        ("gelu", "batch", GradientDropout(0.9), "in ReLU networks alone"),
        ("relu", "group", GradientDropout(0.9), "statistics of the image"),
        ("relu", "batch", GaussianNoise(0.01), "takes updates without noise"),
        ("relu", "batch", GradientDropout(0.995), "length of the features is not known"),
    ],
)
def test_other_updates_are_refused(image: Tensor, activation: str, norm: str, defense: Defense, words: str) -> None:
    client = Client(network(activation, norm), "eval", defense=defense)
    seen = client.observe(image, LABEL, Knowledge(defense=True), torch.Generator().manual_seed(0))
    with pytest.raises((UnsupportedModelError, ThreatModelError), match=words):
        TopDownMatching().prepare(seen).with_labels(LABEL)


def test_several_images_and_statistics_of_the_batch_are_refused(image: Tensor) -> None:
    two = Client(network(), "eval", defense=GradientDropout(0.9)).observe(
        image.expand(2, -1, -1, -1), LABEL.expand(2), Knowledge(), torch.Generator().manual_seed(0)
    )
    with pytest.raises(UnsupportedModelError, match="the gradient of one image; got 2 images"):
        TopDownMatching().prepare(two)
    with pytest.raises(UnsupportedModelError, match="BatchNorm with the model's statistics"):
        TopDownMatching().prepare(observed(image, GradientDropout(0.9), mode="train"))


@pytest.mark.parametrize(("weight", "begins"), [(0.0, 0.5), (1.0, 0.0), (1.0, 1.0)])
def test_settings_are_checked(weight: float, begins: float) -> None:
    with pytest.raises(ConfigError, match="weight above 0 and begins in"):
        TopDownMatching(weight, begins)
