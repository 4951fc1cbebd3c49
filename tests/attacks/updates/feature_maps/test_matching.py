"""Images from exactly recovered maps, and which label belongs to which of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import pytest
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from lit_recon.attacks.updates import (
    LBFGS,
    DeepImagePrior,
    FeaturesOnly,
    GradientMatching,
    MapMatching,
    MapRecovery,
    Pixels,
    TotalVariation,
)
from lit_recon.attacks.updates.feature_maps import upstream
from lit_recon.attacks.updates.feature_maps.matching import (
    ANGLE,
    EXPLAINED,
    FeatureMapPenalty,
    InputMap,
    arranged_labels,
)
from lit_recon.attacks.updates.gradient_matching.matching import update_distance
from lit_recon.clients import Client, GradientOperator, LocalSteps
from lit_recon.clients.client import Rule
from lit_recon.defenses import (
    Defense,
    GaussianNoise,
    GradientClipping,
    GradientDropout,
    GradientPruning,
    PerExampleClipping,
)
from lit_recon.errors import ConfigError, UnsupportedModelError
from lit_recon.models import Backbone
from lit_recon.records import (
    BatchNormMode,
    ForwardOperator,
    Knowledge,
    Loss,
    Normalization,
    Observation,
    Reconstruction,
)
from tests.attacks.updates.feature_maps.networks import Shallow, backbone, observed


def matched(found: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """Mean squared errors after an optimal matching, and the index of the truth for every image found."""
    errors = (found[:, None] - truth[None]).square().flatten(2).mean(2)
    rows, columns = linear_sum_assignment(errors.numpy())
    return errors[rows, columns], torch.from_numpy(columns)


def affinely(found: Tensor, truth: Tensor) -> Tensor:
    """Images with the brightness and contrast, the same for the whole batch, that bring them closest to others."""
    flat, wanted = (x.transpose(0, 1).flatten(1).double() for x in (found, truth))
    slopes = ((flat - flat.mean(1, keepdim=True)) * (wanted - wanted.mean(1, keepdim=True))).mean(1)
    slopes = slopes / flat.var(1, correction=0)
    shifts = wanted.mean(1) - slopes * flat.mean(1)
    return (slopes[:, None, None] * found + shifts[:, None, None]).float()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "known", "largest"),
    # measured 1e-9 to 5e-9, and 0.037 of the variance: margins of 20 and of 1.5
    [("eval", False, 1e-7), ("train", False, 0.055), ("train", True, 1e-7)],
)
def test_images_follow_from_their_maps(
    photographs: Tensor, mode: Literal["eval", "train"], known: bool, largest: float
) -> None:
    images = photographs[:3, :, ::2, ::2]
    torch.manual_seed(0)
    model = Backbone(Shallow(), 5, Normalization((0.5,) * 3, (0.25,) * 3)).eval()
    seen = observed(images, model, mode)
    if known:
        told = Knowledge(batch_norm="batch")
        seen = Client(model, mode).observe(images, torch.arange(3), told, torch.Generator().manual_seed(0))
    attack = GradientMatching(
        FeaturesOnly(),
        features=MapMatching(further=0),
        parametrization=Pixels(spread=0.2),
        solver=LBFGS(history=20),
        steps=15,
    )
    result = attack(seen)
    found = result.images
    if mode == "train" and not known:  # statistics of the batch hide brightness and contrast
        found = affinely(found, images[matched(found, images)[1]])
    errors, order = matched(found, images)
    baseline = (images.mean(0) - images).square().mean()
    assert float(errors.mean()) < largest * float(baseline)
    assert result.labels.tolist() == [int(i) % 3 for i in order]
    assert result.features is None


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_contrast_that_maps_do_not_tell_is_that_of_public_images(
    photographs: Tensor, mode: Literal["eval", "train"]
) -> None:
    images = photographs[:3, :, ::2, ::2]
    torch.manual_seed(0)
    seen = observed(images, Backbone(Shallow(), 5, Normalization((0.5,) * 3, (0.25,) * 3)).eval(), mode)
    penalty = MapMatching().prepare(seen)
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(1))
    pale = 0.5 + 0.5 * (images - 0.5) + 0.003 * noise
    found = penalty.settled(pale)
    if mode == "eval":
        assert torch.equal(found, pale)
    else:
        assert float(((found - 0.5) / 0.25).square().mean()) == pytest.approx(1.0, rel=1e-4)


def test_known_statistics_tell_the_contrast_that_maps_hide(photographs: Tensor) -> None:
    images, labels = photographs[:1, :, ::2, ::2], torch.zeros(1, dtype=torch.int64)
    torch.manual_seed(0)
    model = Backbone(Shallow(), 5, Normalization((0.5,) * 3, (0.25,) * 3)).eval()
    for knowledge, certified in ((Knowledge(batch_norm="batch"), True), (Knowledge(), False)):
        seen = Client(model, "train").observe(images, labels, knowledge)
        penalty = MapMatching().prepare(seen)
        near = images + 1e-4 * torch.randn(images.shape, generator=torch.Generator().manual_seed(1))
        sure, _, notes = penalty.certificate(near, labels)
        assert bool(sure.all()) is certified, notes
        # another contrast has nearly the same maps, but not the same statistics
        assert not penalty.certificate(0.5 + 0.8 * (near - 0.5), labels)[0].any()


def smooth(photographs: Tensor) -> tuple[Tensor, Observation]:
    """Three images behind a layer with GELU, which leaves no zeros by which their maps could be told apart."""
    images = photographs[:3, :, ::2, ::2]
    torch.manual_seed(0)
    model = Backbone(Shallow(), 5, Normalization((0.5,) * 3, (0.25,) * 3)).eval()
    model.trunk.layers[2] = torch.nn.GELU()  # type: ignore[index, operator, union-attr]
    return images, observed(images, model)


def test_images_of_a_batch_follow_from_the_span_of_their_maps(photographs: Tensor) -> None:
    images, seen = smooth(photographs)
    attack = GradientMatching(
        FeaturesOnly(),
        [TotalVariation(0.1, until=0.2)],
        features=MapMatching(further=0),
        parametrization=Pixels(box=False, spread=0.2, smooth=0.5),
        solver=LBFGS(history=100),
        steps=16,
    )
    result = attack(seen)
    errors, order = matched(result.images, images)
    assert float(errors.max()) < 1e-6  # at most 1e-9 measured
    assert result.certified is not None
    assert result.certified.all()
    assert result.labels.tolist() == [int(i) % 3 for i in order]
    assert any(note.startswith("3 directions that span the maps") for note in result.notes)


def test_candidates_in_a_span_are_kept_apart(photographs: Tensor) -> None:
    images, seen = smooth(photographs)
    penalty = MapMatching().prepare(seen)
    labels, twice = torch.arange(3) % 3, images[[0, 0, 1]]
    assert float(penalty.angles(twice).max()) < 1e-7  # each lies in the span; 1e-9 measured
    early, late = (
        [float(penalty.penalty(x, penalty.targets(x, None), progress)) for x in (images, twice)] for progress in (0, 1)
    )
    assert early[1] > early[0] + 1
    assert late == pytest.approx([0, 0], abs=1e-5)
    # the update of the batch tells
    assert penalty.certificate(images, labels)[0].all()
    certified, _, notes = penalty.certificate(twice, labels)
    assert not certified.any()
    assert "the update of the images is not the observed one" in notes[0]
    # a further start is taken or left as a whole, by the update: all maps of `twice` are in the span
    truth, doubled = (Reconstruction(x, labels, 0.0) for x in (images + 0.001, twice))
    assert torch.equal(penalty.closer(doubled, truth, "again").images, truth.images)
    assert torch.equal(penalty.closer(truth, doubled, "again").images, truth.images)


def test_images_found_in_a_span_are_kept_each_once(photographs: Tensor) -> None:
    images, seen = smooth(photographs)
    penalty = MapMatching().prepare(seen)
    near = images[[0, 0, 1]].clone()
    near[1] += 1e-4
    none = torch.zeros(3, dtype=torch.bool)
    found = Reconstruction(near, torch.arange(3), 0.0, certified=none)
    kept = penalty.kept(found)
    assert kept is not None
    assert kept.tolist() == [True, False, True]
    mixture = replace(found, images=torch.stack([images[0], 0.5 * (images[0] + images[1]), images[1]]))
    assert penalty.kept(mixture).tolist() == [True, False, True]  # type: ignore[union-attr]
    # where maps are told apart, certified images are kept
    apart = replace(penalty, recovered=replace(penalty.recovered, separated=True))
    assert torch.equal(apart.kept(found), none)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("activation", "mixed", "expected", "why"),
    [
        (nn.GELU(), ((1, 0, 0), (0, 1, 0), (0, 0, 1)), (True, True, True), ""),
        (nn.GELU(), ((1, 0, 0), (0, 1, 0), (0, 1, 0)), (True, True, False), "another image has the same map"),
        (nn.Identity(), ((1, 0, 0), (0, 0.5, 0.5), (0, 0.2, 0.8)), (False, False, False), "mixtures with other images"),
    ],
)
def test_a_span_and_small_gradients_certify_no_repeated_images_and_no_mixtures(
    photographs: Tensor, activation: nn.Module, mixed: Sequence[Sequence[float]], expected: Sequence[bool], why: str
) -> None:
    images, labels = photographs[:3, :, ::4, ::4], torch.tensor([1, 0, 0])
    torch.manual_seed(0)
    model = Backbone(Shallow(8, 64), 5, Normalization((0.5,) * 3, (0.25,) * 3)).eval()
    model.trunk.layers[2] = activation  # type: ignore[index, operator, union-attr]
    with torch.no_grad():
        model.head.bias[0] = 6.0  # the last two images are predicted so well that the update hardly tells of them
    penalty = MapMatching().prepare(Client(model).observe(images, labels))
    found = torch.einsum("ij,jchw->ichw", torch.tensor(mixed, dtype=images.dtype), images)
    assert penalty.spanned
    assert float(penalty.angles(found).max()) < ANGLE
    assert update_distance(penalty.observation, found, labels) < EXPLAINED
    certified, final, notes = penalty.certificate(found, labels)
    assert (tuple(certified.tolist()), final) == (expected, all(expected)), notes
    assert all(why in note for note in notes)
    # further starts look for the others
    kept = penalty.kept(Reconstruction(found, labels, 0.0, certified=certified))
    assert kept is not None
    assert tuple(kept.tolist()) == expected


def test_a_single_image_with_known_statistics_is_followed_for_a_further_start_only(
    photographs: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = Backbone(Shallow(side=8, channels=64), 5, Normalization((0.5,) * 3, (0.25,) * 3)).eval()
    truth = photographs[:1, :, ::4, ::4]
    labels, calls = torch.tensor([0]), []
    follow = upstream.nearest_maps
    monkeypatch.setattr(upstream, "nearest_maps", lambda *given: calls.append(given) or follow(*given))
    for mode, knowledge, at_once in (
        ("eval", Knowledge(), True),
        ("train", Knowledge(), True),  # contrast shows in accurate maps only
        ("train", Knowledge(batch_norm="batch"), False),
    ):
        before, seen = len(calls), Client(model, mode).observe(truth[:1], labels, knowledge)
        penalty = MapMatching().prepare(seen).with_labels(labels)
        assert (len(calls) > before) is at_once, (mode, knowledge)
    assert penalty.known is None
    found = Reconstruction(truth[:1], labels, 0.0)
    for going in (True, False):
        further = penalty.for_further_start(found, going)
        assert further.known is not None
        assert float(further.angles(found.images)) < 1e-9
        assert further.prior_share(0.0) == (0.0 if going else 1.0)
        assert further.notes[: len(penalty.notes)] == penalty.notes
    assert len(calls) == before + 1  # both use the same maps


def test_images_with_the_recovered_maps_but_another_update_go_on(photographs: Tensor) -> None:
    torch.manual_seed(0)
    truth = photographs[:2, :, ::4, ::4]
    seen = observed(truth, Backbone(Shallow(side=8, channels=64), 5, Normalization((0.5,) * 3, (0.25,) * 3)).eval())
    penalty = MapMatching().prepare(seen)
    assert isinstance(penalty, FeatureMapPenalty)
    images, labels = truth[penalty.in_order(truth)], torch.arange(2)
    noise = torch.randn(truth.shape, generator=torch.Generator().manual_seed(0))
    near, far = (Reconstruction(images + size * noise, labels, 0.0) for size in (1e-4, 0.1))
    assert float(penalty.angles(near.images).max()) < ANGLE < float(penalty.angles(far.images).max())
    assert [penalty.goes_on(one, fresh) for one in (near, far) for fresh in (True, False)] == [
        True,
        False,
        False,
        False,
    ]


def test_maps_are_those_of_the_layer(photographs: Tensor) -> None:
    model = backbone()
    seen = observed(photographs[:2], model)
    given: list[Tensor] = []
    model.trunk.blocks[5].conv1.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0]))  # type: ignore[index, union-attr, operator]
    model(photographs[:2])
    maps = InputMap(seen, "trunk.blocks.5.conv1", "eval")(photographs[:2])
    torch.testing.assert_close(maps, torch.nn.functional.normalize(given[0].flatten(1)), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_labels_find_their_images(photographs: Tensor, noise: float) -> None:
    images = photographs[:5]
    labels = torch.arange(5) % 3
    seen = observed(images)
    near = (images + noise * torch.randn(images.shape, generator=torch.Generator().manual_seed(1))).clamp(0, 1)
    assert arranged_labels(seen, near, labels.sort().values).tolist() == labels.tolist()
    assert arranged_labels(seen, near.flip(0), labels).tolist() == labels.flip(0).tolist()


@pytest.mark.parametrize("size", [1, 5])
def test_labels_that_a_defense_has_spoiled_follow_from_images(photographs: Tensor, size: int) -> None:
    images, labels = photographs[:size], torch.arange(size) % 3
    seen = observed(images, defense=GradientDropout(0.7))
    assert arranged_labels(seen, images, (labels + 1) % 3).tolist() == labels.tolist()
    # labels that the attacker was told stand
    told = replace(seen, labels=labels, knowledge=replace(seen.knowledge, labels=True))
    assert sorted(arranged_labels(told, images, (labels + 1) % 3).tolist()) == sorted(((labels + 1) % 3).tolist())


def by_difference(model: nn.Module, batch_norm: BatchNormMode, loss: Loss) -> ForwardOperator:
    """One local step, released as the difference of weights: a hundredth of the gradient."""
    return LocalSteps(model, 1, 0.01, release="difference", batch_norm=batch_norm, loss=loss)


def small(seed: int = 0) -> tuple[Backbone, Tensor, Tensor]:
    """A network that is sure of its mostly wrong predictions, images and labels."""
    model = backbone(width=8, side=16)
    with torch.no_grad():
        model.head.weight.mul_(20)
    images = torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
    return model, images * torch.linspace(0.3, 1, 4)[:, None, None, None], torch.tensor([2, 0, 1, 2])


@pytest.mark.parametrize(
    ("defense", "rule"),
    [(GradientClipping(0.1), GradientOperator), (PerExampleClipping(0.1), GradientOperator), (None, by_difference)],
    ids=["clipped", "clipped one by one", "difference"],
)
def test_labels_find_their_images_in_a_scaled_update(defense: Defense | None, rule: Rule) -> None:
    model, images, labels = small()
    plain, scaled = (
        Client(model, "eval", *how).observe(images, labels, Knowledge(labels=True))
        for how in ((None,), (defense, rule))
    )
    sizes = [float(seen.update["head.weight"].norm()) for seen in (plain, scaled)]
    assert sizes[1] < 0.05 * sizes[0]
    assert arranged_labels(scaled, images.flip(0), labels).tolist() == labels.flip(0).tolist()


def test_maps_cannot_condition_a_network(photographs: Tensor) -> None:
    attack = GradientMatching(features=MapMatching(), parametrization=DeepImagePrior(conditioned=True))
    with pytest.raises(ConfigError, match="but not on maps"):
        attack(observed(photographs[:1]))
    with pytest.raises(ConfigError, match="weight above 0"):
        MapMatching(weight=0)


def test_maps_of_one_layer_make_way_where_known_noise_shows(photographs: Tensor) -> None:
    labels, strong = torch.zeros(2, dtype=torch.int64), GaussianNoise(1e-4)
    for defense, n, known, refused in [
        (strong, 1, True, True),
        (GaussianNoise(1e-9), 1, True, False),
        (GaussianNoise(1e-5), 2, True, False),
        (strong, 1, False, False),
    ]:
        seen = Client(backbone(side=16), "eval", defense).observe(
            photographs[:n, :, ::2, ::2], labels[:n], Knowledge(defense=known), torch.Generator().manual_seed(0)
        )
        if refused:
            with pytest.raises(UnsupportedModelError, match="noise of known standard deviation 0.0001 distorts"):
                MapMatching().prepare(seen)
        else:
            assert len(MapMatching().prepare(seen).maps) == n


def test_maps_make_way_where_hidden_entries_distort_them(photographs: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = MapRecovery()
    for share, known, outside, refused in [
        (0.01, True, 2e-5, True),
        (0.01, True, 5e-6, False),
        (0.0, True, 2e-5, False),
        (0.01, False, 2e-5, False),
    ]:
        defense = GradientPruning(share)
        seen = Client(backbone(), "eval", defense).observe(
            photographs[:1], torch.zeros(1, dtype=torch.int64), Knowledge(defense=known)
        )
        found = replace(exact(observed(photographs[:1])), outside=outside)
        penalty = MapMatching()
        monkeypatch.setattr(penalty, "recovery", lambda _, found=found: found)
        if refused:
            with pytest.raises(UnsupportedModelError, match="hidden entries distort the maps of .*, 2e-05 of their"):
                penalty.prepare(seen)
        else:
            assert len(penalty.prepare(seen).maps) == 1
