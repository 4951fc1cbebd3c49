"""Maps of earlier layers, against those that the tests' own images cause, and certificates of images."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from lit_recon.attacks.updates import LBFGS, FeaturesOnly, GradientMatching, MapMatching, MapRecovery, Pixels
from lit_recon.attacks.updates.feature_maps import matching
from lit_recon.attacks.updates.feature_maps.convolutions import Convolution
from lit_recon.attacks.updates.feature_maps.convolutions import patch_system as system_of
from lit_recon.attacks.updates.feature_maps.matching import REACH, FeatureMapPenalty, InputMap
from lit_recon.attacks.updates.feature_maps.pinned_network import PinnedNetwork, _factors, measured_maps
from lit_recon.attacks.updates.feature_maps.recovery import RecoveredMaps
from lit_recon.attacks.updates.feature_maps.upstream import KnownMaps, _Behind, _solved
from lit_recon.attacks.updates.feature_maps.upstream import nearest_maps as nearest_to
from lit_recon.clients import Client, LocalSteps
from lit_recon.defenses import Defense, GaussianNoise, GradientClipping, GradientPruning, PerExampleClipping
from lit_recon.models import Backbone, Trunk
from lit_recon.records import BatchNormMode, Knowledge, Normalization, Observation
from tests.attacks.updates.feature_maps.networks import backbone, observed


def nearest_maps(seen: Observation, labels: Tensor) -> KnownMaps | str:
    return nearest_to(seen, MapRecovery()(seen), labels)


def true_inputs(seen: Observation, images: Tensor) -> dict[str, Tensor]:
    """The inputs of all convolutions in double precision."""
    network = PinnedNetwork(seen)
    network(images.double())
    return {name: value.detach().clone() for name, value in network.inputs.items()}


@pytest.mark.parametrize(("stride", "padding"), [(1, 1), (2, 1), (2, 0)])
def test_the_system_gives_the_gradient(stride: int, padding: int) -> None:
    generator = torch.Generator().manual_seed(0)
    layer = nn.Conv2d(2, 5, 3, stride=stride, padding=padding, bias=False).double()
    maps = torch.randn(3, 2, 8, 8, generator=generator, dtype=torch.float64)
    outputs = layer(maps)
    derivative = torch.randn(outputs.shape, generator=generator, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(outputs, layer.weight, derivative)
    places = outputs[0, 0].numel()
    geometry = Convolution("", (2, 8, 8), 5, (3, 3), (stride, stride), (padding, padding), places, True)
    columns = maps.transpose(0, 1).flatten(1).T
    torch.testing.assert_close(system_of(geometry, derivative) @ columns, gradient.permute(0, 2, 3, 1).flatten(0, 2))


@pytest.fixture(scope="module")
def followed(photographs: Tensor) -> tuple[Observation, KnownMaps]:
    seen = observed(photographs[1:3])
    found = nearest_maps(seen, torch.tensor([1, 0]))  # in another order than the images
    assert isinstance(found, KnownMaps)
    return seen, found


def test_maps_are_followed_towards_the_images(followed: tuple[Observation, KnownMaps], photographs: Tensor) -> None:
    seen, found = followed
    truth = true_inputs(seen, photographs[1:3])
    *_, nearest = found.maps
    assert list(truth).index(nearest) < list(truth).index("trunk.blocks.4.conv2")
    order = [int(label) for label in found.labels]  # labels are 0 and 1, in the order of the images
    assert sorted(order) == [0, 1]
    for name, maps in found.maps.items():
        error = float((maps - truth[name][order]).norm() / truth[name].norm())
        assert error < 1e-4, name  # measured 1e-6 to 1e-5
        assert error < 30 * max(found.errors[name], 1e-6), name
    assert found.stopped.startswith("trunk.blocks.")


def test_a_wrong_zero_is_found(followed: tuple[Observation, KnownMaps], photographs: Tensor) -> None:
    seen, _ = followed
    truth = true_inputs(seen, photographs[1:3])
    names = list(truth)
    network = PinnedNetwork(seen)
    labels = torch.tensor([0, 1])
    behind, group = "trunk.blocks.6.conv1", "trunk.blocks.5.conv2"
    network.given = {name: truth[name].clone() for name in names[names.index(behind) :]}
    shared = [name for name in names if torch.equal(truth[name], truth[behind])]
    positive = (truth[behind] > 0).nonzero()
    at = tuple(positive[len(positive) // 2].tolist())
    spoilt = truth[behind].clone()
    spoilt[at] = 0
    for name in shared:
        network.given[name] = spoilt
    network()
    solved = _solved(seen, network, labels, [group], _Behind(shared, spoilt == 0))
    assert not isinstance(solved, str)
    assert torch.equal(network.given[behind] > 0, truth[behind] > 0)


def test_wrong_labels_explain_nothing(photographs: Tensor) -> None:
    found = nearest_maps(observed(photographs[:1]), torch.tensor([2]))
    assert isinstance(found, str)
    assert "no norms" in found


@pytest.mark.parametrize("clipped", [False, True])
def test_labels_come_in_the_order_of_the_maps(clipped: bool) -> None:
    images = torch.rand(3, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    model, defense = backbone(width=8, side=16), None
    if clipped:  # and the model is sure of predictions that are no labels
        defense = GradientClipping(0.1)
        with torch.no_grad():
            model.head.weight.mul_(20)
    seen = Client(model, defense=defense).observe(images, torch.tensor([2, 0, 1]), Knowledge(defense=True))
    layer = "trunk.blocks.7.conv1"
    truth = true_inputs(seen, images)[layer]
    norms = truth.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
    found = measured_maps(seen, PinnedNetwork(seen), layer, truth / norms, torch.tensor([0, 1, 2]))
    # Ordered by the head's inputs of another forward pass, no norms explain the gradient.
    assert found is not None
    assert found[1].tolist() == [2, 0, 1]
    assert float((found[0] - truth).norm() / truth.norm()) < 1e-5  # measured 4e-7


@pytest.mark.slow
@pytest.mark.parametrize("told", [False, True])
def test_the_scale_of_a_clipped_update_is_found(photographs: Tensor, told: bool) -> None:
    whole = observed(photographs[1:3])
    size = sum(float(value.square().sum()) for value in whole.update.values()) ** 0.5
    seen = observed(photographs[1:3], defense=GradientClipping(0.3 * size))
    if told:
        seen = replace(seen, defense=GradientClipping(0.3 * size), knowledge=Knowledge(defense=True))
    found = nearest_maps(seen, torch.tensor([1, 0]))
    assert isinstance(found, KnownMaps)
    assert len(found.maps) > 2, found.stopped
    truth = true_inputs(seen, photographs[1:3])
    order = found.labels.tolist()
    for name, maps in found.maps.items():
        error = float((maps - truth[name][order]).norm() / truth[name].norm())
        assert error < 1e-4, name
    layer = next(iter(found.maps))
    directions = found.maps[layer] / found.maps[layer].flatten(1).norm(dim=1).view(-1, 1, 1, 1)
    measured = measured_maps(seen, PinnedNetwork(seen), layer, directions, torch.tensor([0, 1]))
    assert measured is not None
    assert measured.scale == pytest.approx(0.3, rel=1e-4)


class Bare(Trunk):
    """Two convolutions; behind the first ReLU without a bias."""

    def __init__(self) -> None:
        super().__init__((3, 8, 8), {})
        self.out_features = 16 * 8 * 8
        first, second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1, bias=False)
        self.layers = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Flatten())

    def forward(self, images: Tensor) -> Tensor:
        maps: Tensor = self.layers(images)
        return maps


@pytest.mark.parametrize("bias", [False, True])
def test_a_factor_that_no_bias_tells_from_the_norm_is_not_guessed(photographs: Tensor, bias: bool) -> None:
    """Of two classes the derivatives of the logits have one direction: any norm fits with some factor."""
    torch.manual_seed(0)
    model = Backbone(Bare(), 2, Normalization((0.5,) * 3, (0.25,) * 3)).eval()
    model.head = nn.Linear(model.trunk.out_features, 2, bias=bias)
    image, labels, defense = photographs[:1, :, ::4, ::4], torch.zeros(1, dtype=torch.int64), GradientClipping(0.01)
    seen = Client(model, "eval", defense).observe(image, labels, Knowledge(defense=True))
    layer = "trunk.layers.2"
    truth = true_inputs(seen, image)[layer]
    found = measured_maps(seen, PinnedNetwork(seen), layer, truth / truth.norm(), labels)
    if not bias:
        assert found is None
        return
    assert found is not None
    assert float((found.maps - truth).norm() / truth.norm()) < 1e-3


@pytest.mark.parametrize(
    ("defense", "known", "expected"),
    [
        (Defense(), True, (False,)),
        (GradientClipping(1.0), True, (True,)),
        (PerExampleClipping(1.0), True, (True,)),
        (GradientPruning(0.5), True, (False,)),
        (GaussianNoise(1e-6), True, (False,)),
        (Defense(), False, (False, True)),
    ],
)
def test_factors_are_sought_where_a_defense_may_have_scaled(
    photographs: Tensor, defense: Defense, known: bool, expected: tuple[bool, ...]
) -> None:
    client = Client(backbone(norm="group"), "eval", defense)
    labels, generator = torch.zeros(1, dtype=torch.int64), torch.Generator().manual_seed(0)
    seen = client.observe(photographs[:1], labels, Knowledge(defense=known), generator)
    assert _factors(seen, "head.weight") == expected
    local = LocalSteps(client.model, 1, 0.1)
    assert _factors(replace(seen, operator=local), "head.weight") == (False,)


def test_convolutions_before_given_maps_can_be_skipped(photographs: Tensor) -> None:
    seen = observed(photographs[:2])
    network, layer, labels = PinnedNetwork(seen), "trunk.blocks.5.conv1", torch.arange(2)
    network.given = {layer: true_inputs(seen, photographs[:2])[layer]}
    logits, gradient = network().detach(), network.head_gradient(["head.weight", "head.bias"], labels)
    names = list(network.inputs)
    network.skipped = set(names[: names.index(layer)])
    assert torch.equal(network().detach(), logits)
    assert torch.equal(network.head_gradient(["head.weight", "head.bias"], labels), gradient)
    assert not any(network.outputs[name].any() for name in network.skipped)
    assert network.outputs[layer].any()


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_norms_with_statistics_are_followed(norm: str, photographs: Tensor) -> None:
    seen = observed(photographs[1:2], backbone(norm=norm), mode="train")
    found = nearest_maps(seen, torch.tensor([0]))
    assert isinstance(found, KnownMaps)
    truth = true_inputs(seen, photographs[1:2])
    assert len(found.maps) > 2, found.stopped
    for name, maps in found.maps.items():
        error = float((maps - truth[name]).norm() / truth[name].norm())
        assert error < 1e-4, name
        assert error < 30 * max(found.errors[name], 1e-6), name


def test_several_steps_are_not_followed(photographs: Tensor) -> None:
    client = Client(backbone(), rule=lambda model, mode, loss: LocalSteps(model, 2, 1e-5, batch_norm=mode, loss=loss))
    seen = client.observe(photographs[:1], torch.tensor([0]))
    assert isinstance(nearest_maps(seen, torch.tensor([0])), str)


@pytest.mark.slow
def test_an_untrained_network_gives_its_image_with_a_certificate(photographs: Tensor) -> None:
    seen = observed(photographs[1:2], backbone(width=48))
    attack = GradientMatching(
        FeaturesOnly(),
        features=MapMatching(),
        parametrization=Pixels(box=True, spread=0.2),
        solver=LBFGS(history=20),
        steps=15,
    )
    result = attack(seen)
    rmse = float((result.images - photographs[1:2]).square().mean().sqrt())
    assert rmse < 0.01  # measured below 5e-5 for three images, three seeds and two widths
    assert any("maps followed layer by layer up to" in note for note in result.notes)
    assert result.certified is not None
    assert result.certified.tolist() == [True]
    assert not any("certified" in note for note in result.notes)


def test_images_with_other_maps_are_not_certified(photographs: Tensor) -> None:
    penalty = MapMatching().prepare(observed(photographs[:2])).with_labels(torch.tensor([0, 1]))
    own = penalty.input_map(photographs[:2]) @ penalty.maps.float().T
    images = photographs[own.argmax(dim=0)]
    labels = penalty.labels(images, torch.tensor([0, 1]))
    certified, _, notes = penalty.certificate(images, labels)
    assert (certified.tolist(), notes) == ([True, True], ())
    noise = 0.02 * torch.randn(images[1:].shape, generator=torch.Generator().manual_seed(0))
    near = torch.cat([images[:1], (images[1:] + noise).clamp(0, 1)])
    certified, final, (note,) = penalty.certificate(near, labels)
    assert (certified.tolist(), final) == ([True, False], False)
    assert note.startswith("image 2: not certified: its maps are not the recovered ones (1 - cos 0.0")


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2])
def test_contrast_that_a_norm_hides_is_not_certified(
    photographs: Tensor, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matching, "_ENTRIES", 0.0)  # the maps of this narrow network are too small for certificates
    images, labels, layer = photographs[1 : 1 + n], torch.arange(n), "trunk.blocks.2.conv2"
    reach, beyond = {}, {}
    for mode in get_args(BatchNormMode):
        seen = observed(images, mode=mode)
        maps = true_inputs(seen, images)[layer]
        known = KnownMaps({layer: maps}, {layer: 1e-6}, labels)
        found = RecoveredMaps(PinnedNetwork(seen).convolutions[layer], maps, 0.0, 1.0, 0.0, 1)
        input_map = InputMap(seen, layer, mode)
        penalty = FeatureMapPenalty(seen, found, maps.flatten(1), None, input_map, 1.0, (), known)._on([layer])
        assert penalty.certificate(images, labels)[0].all()
        with monkeypatch.context() as context:
            context.setattr(matching, "_ENTRIES", 1e3)
            certified, _, notes = penalty.certificate(images, labels)
            assert not certified.any()
            assert re.search(r"its maps have \d+ recovered entries above zero for \d+ pixels", notes[0])
        # by brute force: the change of contrast that the maps show as an angle of 1e-8
        flat = images - images.mean((0, 2, 3), keepdim=True)
        shares = torch.logspace(-5, 0, 31, dtype=torch.float64)
        with torch.no_grad():
            precise = input_map.doubled()
            shown = torch.stack([precise(images + share * flat) - precise(images.double()) for share in shares])
        within = shares[0.5 * shown.square().sum((1, 2)) <= n * 1e-8]
        beyond[mode] = float(within[-1] * flat.square().mean().sqrt()) if len(within) else 0.0
        reach[mode] = float(penalty.reach(images, torch.full((n,), 1e-8)).square().mean().sqrt())
        if mode == "train":
            other = (images + within[-1] * flat).float().clamp(0, 1)
            certified, final, notes = penalty.certificate(other, labels)
            assert (certified.any(), final) == (False, True)
            assert "other brightness or contrast has the same maps" in notes[0]
    # contrast alone is one of the directions, steps of the search are 50 %
    assert all(reach[mode] > 0.6 * beyond[mode] for mode in reach)
    assert reach["eval"] < REACH < reach["train"]


def test_a_saturated_channel_has_no_contrast_to_be_known(photographs: Tensor) -> None:
    image, layer = photographs[1:2].clone(), "trunk.blocks.2.conv2"
    image[:, 0] = 1.0
    seen = observed(image)
    maps = true_inputs(seen, image)[layer]
    found = RecoveredMaps(PinnedNetwork(seen).convolutions[layer], maps, 0.0, 1.0, 0.0, 1)
    known = KnownMaps({layer: maps}, {layer: 1e-6}, torch.tensor([0]))
    input_map = InputMap(seen, layer, "eval")
    penalty = FeatureMapPenalty(seen, found, maps.flatten(1), None, input_map, 1.0, (), known)
    assert float(penalty.reach(image, torch.tensor([1e-12]))) < REACH
