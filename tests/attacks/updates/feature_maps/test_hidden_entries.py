"""Maps and images from gradients of which a defense hides entries."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor

from lit_recon.attacks.updates import LBFGS, FeaturesOnly, GradientMatching, MapMatching, MapRecovery, Pixels
from lit_recon.attacks.updates.feature_maps import matching, recovery
from lit_recon.attacks.updates.feature_maps.convolutions import (
    Convolution,
    PatchProjection,
    PatchSpan,
    without_constants,
)
from lit_recon.attacks.updates.feature_maps.matching import FeatureMapPenalty, InputMap
from lit_recon.defenses import Chain, Defense, GradientClipping, GradientDropout, GradientPruning, PercentilePrivacy
from lit_recon.errors import UnsupportedModelError
from lit_recon.models import Backbone
from lit_recon.records import Knowledge, Normalization, Observation
from tests.attacks.updates.feature_maps.networks import Shallow, backbone, observed
from tests.attacks.updates.feature_maps.test_recovery import worst_angle

Mode = Literal["eval", "train"]
LAYERS = ["trunk.blocks.6.conv2", "trunk.blocks.7.conv1"]


def covered_angle(found: recovery.RecoveredMaps, seen: Observation, images: Tensor, mode: Mode) -> float:
    truth = InputMap(seen, found.convolution.name, mode, [found.cover])(images)
    return worst_angle(found.maps, torch.nn.functional.normalize(truth.double()))


@pytest.mark.parametrize(
    ("defense", "mode", "norm"),
    [
        (GradientPruning(0.5), "eval", "batch"),
        (GradientPruning(0.5, "tensor"), "train", "batch"),
        (GradientDropout(0.5, rescale=True), "train", "batch"),
        (GradientDropout(0.3), "eval", "group"),
        (
            Chain([GradientClipping(1.0), GradientPruning(0.4), GradientDropout(0.2), GradientClipping(0.1)]),
            "eval",
            "batch",
        ),
        (PercentilePrivacy(50.0), "eval", "batch"),
    ],
)
def test_covered_entries_of_maps_are_exact(
    photographs: Tensor, defense: Defense, mode: Mode, norm: Literal["batch", "group"]
) -> None:
    images = photographs[:1]
    seen = observed(images, backbone(norm=norm), mode, defense)
    found = MapRecovery(LAYERS)(seen)
    assert [layer.convolution.name for layer in (found, *found.others)] == LAYERS
    for layer in (found, *found.others):
        assert covered_angle(layer, seen, images, mode) < 1e-6  # measured at most 2e-7
        assert layer.cover.double().mean() > 0.3
        assert not layer.maps[:, ~layer.cover].any()
        assert layer.outside < 1e-8


def test_clipped_entries_count_as_hidden_if_the_clipping_is_known(photographs: Tensor) -> None:
    images, defense = photographs[:1], PercentilePrivacy(40.0, gamma=0.05)
    seen = observed(images, backbone(), defense=defense)
    with pytest.raises(UnsupportedModelError, match="no matrix of rank 16 has its entries"):
        MapRecovery(LAYERS)(seen)
    found = MapRecovery(LAYERS)(replace(seen, knowledge=Knowledge(defense=True), defense=defense))
    assert [layer.convolution.name for layer in (found, *found.others)] == LAYERS
    assert covered_angle(found, seen, images, "eval") < 1e-6


def test_a_plain_gradient_is_not_completed(photographs: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "complete", None)
    found = MapRecovery(LAYERS)(observed(photographs[:2]))
    assert found.completion is None
    assert found.covered is None
    assert found.cover.all()
    assert found.others == ()


def test_what_is_missing_is_said(photographs: Tensor) -> None:
    with pytest.raises(UnsupportedModelError, match=r"too little is left.*entries"):
        MapRecovery(LAYERS)(observed(photographs[:1], defense=GradientPruning(0.98)))
    seen = observed(photographs[:2], defense=GradientPruning(1.0))
    with pytest.raises(UnsupportedModelError, match="its gradient is zero"):
        MapRecovery(LAYERS)(seen)


def test_entries_without_a_known_coordinate_do_not_enter() -> None:
    layer = Convolution("layer", (2, 4, 4), 40, (3, 3), (1, 1), (1, 1), 16, sparse=True)
    maps = torch.rand(2, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    patches = torch.nn.functional.unfold(maps[None], 3, padding=1)[0]
    known = torch.ones(18, dtype=torch.bool)
    known[9:] = False  # nothing of the second channel
    known[:3] = False
    basis = torch.linalg.qr(patches * known[:, None])[0][:, :6]
    projection = PatchProjection(layer, PatchSpan(basis * known[:, None], 1.0, False, known))
    assert projection.covered[0].all()
    assert not projection.covered[1].any()
    # all patches, on their known entries, are in the span: the projection leaves the map as it is
    vector = (maps / projection.maps(torch.ones(1, 32, dtype=torch.float64))[0].clamp_min(1e-9)).flatten()[None]
    vector[:, 16:] = 0
    torch.testing.assert_close(projection(vector), vector)


def test_a_constant_that_differences_do_not_show_is_left_out() -> None:
    layer = Convolution("layer", (2, 4, 4), 40, (3, 3), (1, 1), (1, 1), 16, sparse=True)
    known = torch.zeros(18, dtype=torch.bool)
    known[:9] = True
    known[9 + 4] = True  # the center alone, which the padding never reaches
    basis = torch.zeros(18, 3, dtype=torch.float64)
    basis[:3] = torch.eye(3, dtype=torch.float64)
    span = PatchSpan(basis, 1.0, True, known)
    constant = torch.zeros(1, 2, 4, 4, dtype=torch.float64)
    constant[:, 1] = 1
    torch.testing.assert_close(PatchProjection(layer, span)(constant.flatten(1)), constant.flatten(1))
    kept = without_constants(layer, span)
    assert kept.known is not None
    assert kept.known.tolist() == [True] * 9 + [False] * 9
    assert not PatchProjection(layer, kept)(constant.flatten(1)).any()
    assert without_constants(layer, span._replace(differences=False)).known is known


def shallow(photographs: Tensor, defense: Defense) -> tuple[Tensor, Observation]:
    images = photographs[:1, :, ::2, ::2]
    torch.manual_seed(0)
    model = Backbone(Shallow(), 5, Normalization((0.5,) * 3, (0.25,) * 3)).eval()
    return images, observed(images, model, "eval", defense)


def test_images_follow_from_covered_entries(photographs: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    images, seen = shallow(photographs, GradientDropout(0.4))
    attack = GradientMatching(
        FeaturesOnly(),
        features=MapMatching(further=0),
        parametrization=Pixels(spread=0.2),
        solver=LBFGS(history=20),
        steps=12,
    )
    result = attack(seen)
    assert float((result.images - images).square().mean().sqrt()) < 1e-3
    assert result.certified is not None
    assert result.certified.all()
    # 40 % are dropped at random: 59 to 61 % of the entries are left
    assert any(re.search(r"completed from its (59|60|61)\.\d%", note) for note in result.notes), result.notes
    # the update has zeros where entries are hidden, which the images' own update has not
    distance = matching.update_distance
    assert distance(seen, result.images, result.labels) > 0.1
    assert distance(seen, result.images, result.labels, observed_only=True) < 1e-3


def test_few_active_entries_certify_no_image(photographs: Tensor) -> None:
    images, seen = shallow(photographs, GradientDropout(0.4))
    penalty = MapMatching(MapRecovery()).prepare(seen)
    assert penalty.certificate(images, torch.zeros(1, dtype=torch.int64))[0].all()
    few = torch.zeros_like(penalty.recovered.cover)
    few[:, :2] = True
    maps = penalty.recovered.maps * few
    fewer = replace(penalty.recovered, maps=maps / maps.norm(), covered=penalty.recovered.cover & few)
    certified, _, notes = of_layers(seen, fewer).certificate(images, torch.zeros(1, dtype=torch.int64))
    assert not certified.any()
    assert "for 768 pixels" in notes[0]


def of_layers(seen: Observation, *found: recovery.RecoveredMaps) -> FeatureMapPenalty:
    return MapMatching()._completed(seen, replace(found[0], others=found[1:]))


def test_maps_of_further_layers_come_in_any_order(photographs: Tensor) -> None:
    seen = observed(photographs[:2], defense=GradientDropout(0.1))
    found = MapRecovery(LAYERS)(seen)
    turned = replace(found.others[0], maps=found.others[0].maps.roll(1, 0))
    for layers in ((found, found.others[0]), (found, turned)):
        penalty = of_layers(seen, *layers)
        images = photographs[:2][penalty.in_order(photographs[:2])]
        assert penalty.angles(images).max() < 1e-6  # 0.1 and more where a map is compared with another's
        assert float(penalty.penalty(images, penalty.targets(images, None), 1.0)) < 1e-3
