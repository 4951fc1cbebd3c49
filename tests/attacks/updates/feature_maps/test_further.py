"""What follows where images are not certified: further starts, further layers, the next attack; and no false one."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lit_recon.attacks.base import Attack
from lit_recon.attacks.updates import (
    LBFGS,
    FeaturesOnly,
    FirstApplicable,
    GradientMatching,
    MapMatching,
    MapRecovery,
    MatchingState,
    PatchMatching,
    Pixels,
)
from lit_recon.attacks.updates.feature_maps import matching, upstream
from lit_recon.attacks.updates.feature_maps.matching import ANGLE, FeatureMapPenalty
from lit_recon.attacks.updates.feature_maps.patch_penalty import PatchPenalty
from lit_recon.attacks.updates.feature_maps.upstream import KnownMaps
from lit_recon.attacks.updates.gradient_matching.further import StartsSoFar
from lit_recon.attacks.updates.gradient_matching.objectives import GlobalCosine
from lit_recon.attacks.updates.gradient_matching.parametrizations import Restart, Variables
from lit_recon.models import Backbone
from lit_recon.modules.attack_state import run_attack
from lit_recon.records import Normalization, Observation, Reconstruction
from lit_recon.training.progress import Interrupted
from tests.attacks.updates.feature_maps.networks import Mode, Shallow, observed


class Stuck(Pixels):
    """Some images stay gray in the first start."""

    def __init__(self, stuck: Sequence[int]) -> None:
        super().__init__(spread=0.2)
        self.stuck = list(stuck)

    def images(self, variables: Variables, restart: Restart) -> Tensor:
        drawn = super().images(variables, restart).clone()
        if restart.seed == 0:
            drawn[self.stuck] = 0.5
        return drawn


class Told(Attack):
    """Returns the images and labels that it was told, the last image first."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels, self.calls = images, labels, 0

    def run(self, observations: Sequence[Observation]) -> list[Reconstruction]:
        self.calls += 1
        return [Reconstruction(self.images.flip(0), self.labels.flip(0), 0.25, notes=("told",)) for _ in observations]


@pytest.fixture(scope="module")
def truth(photographs: Tensor) -> Tensor:
    return photographs[:2, :, ::4, ::4]


@pytest.fixture(scope="module")
def model() -> Backbone:
    torch.manual_seed(0)
    return Backbone(Shallow(side=8, channels=64), 5, Normalization((0.5,) * 3, (0.25,) * 3)).eval()


@pytest.fixture(scope="module")
def seen(truth: Tensor, model: Backbone) -> Observation:
    return observed(truth, model)


def maps(stuck: Sequence[int] = (), further: int = 0, approach: int = 0, steps: int = 8) -> GradientMatching:
    return GradientMatching(
        FeaturesOnly(),
        features=MapMatching(further=further, approach=approach),
        parametrization=Stuck(stuck),
        solver=LBFGS(history=20),
        steps=steps,
    )


def certified(result: Reconstruction) -> list[bool]:
    assert result.certified is not None
    return [bool(one) for one in result.certified]


def penalty_of(state: Any) -> FeatureMapPenalty:
    assert isinstance(state, MatchingState)
    penalty = state.problems[0].feature_penalty
    assert isinstance(penalty, FeatureMapPenalty)
    return penalty


@pytest.fixture(scope="module")
def stuck_once(seen: Observation) -> Reconstruction:
    """Image 2 is gray, and there is no further start."""
    return maps([1])(seen)


def test_images_that_are_stuck_start_again_and_certified_ones_stay(
    seen: Observation, truth: Tensor, stuck_once: Reconstruction
) -> None:
    assert certified(stuck_once) == [True, False]
    assert any(note.startswith("image 2: not certified: its maps are not") for note in stuck_once.notes)
    again = maps([1], further=2)(seen)
    assert certified(again) == [True, True]
    assert torch.equal(again.images[0], stuck_once.images[0])
    nearest = (again.images[:, None] - truth).square().flatten(2).mean(2).min(dim=1)
    assert sorted(nearest.indices.tolist()) == [0, 1]
    assert float(nearest.values.max()) < 1e-4  # measured
    assert "further start 1, from random images: 1 of 2 images closer, 2 certified" in again.notes
    assert not any("start 2" in note or "not certified" in note for note in again.notes)


def test_nothing_follows_where_all_images_are_certified(seen: Observation, stuck_once: Reconstruction) -> None:
    other = Told(stuck_once.images, stuck_once.labels)
    run = FirstApplicable([maps(further=2), other]).begin([seen])
    while run.state is not None and run.state.step < run.n_steps:
        run.advance()
    found = run.results()
    assert certified(found[0]) == [True, True]
    assert run.then(found) is None
    assert other.calls == 0
    assert not any("start" in note or "attack 2" in note for note in found[0].notes)


def test_a_further_start_uses_all_known_layers(
    seen: Observation, truth: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["trunk.layers.3", "trunk.layers.0"]
    with torch.no_grad():
        both = {names[0]: seen.model.trunk.layers[:3](truth * 4 - 2), names[1]: truth * 4 - 2}  # type: ignore[index, union-attr, operator]
    known = KnownMaps({name: maps.double() for name, maps in both.items()}, dict.fromkeys(names, 0.0), torch.arange(2))
    monkeypatch.setattr(upstream, "nearest_maps", lambda *_: known)
    run = maps([0, 1], further=1, steps=1).begin([seen])
    first = penalty_of(run.state)
    run.advance()
    following = run.then(run.results())
    assert following is not None
    wide = penalty_of(following.state)
    assert first.maps.shape == (2, 3 * 8 * 8)
    assert wide.maps.shape == (2, 48 * 4 * 4 + 3 * 8 * 8)
    near = (truth + 0.1).clamp(0, 1)
    apart = []
    for name, maps_of in both.items():
        norms = maps_of.flatten(1).norm(dim=1, keepdim=True)
        own = matching.InputMap(seen, name, "eval")(near, norms)
        apart.append(0.5 * (own - maps_of.flatten(1) / norms).square().sum(1))  # norms are known
    torch.testing.assert_close(wide.angles(near), torch.stack(apart).mean(0).double(), rtol=1e-3, atol=0)
    assert float(wide.angles(truth).max()) < 1e-12
    # norms are known, so that the penalty sees an image of another brightness
    assert float(wide.penalty(truth, wide.targets(truth, None), 1.0)) < 1e-6
    unaware = replace(wide, norms=None)
    seeing, blind = (float(one.penalty(near, one.targets(near, None), 1.0)) for one in (wide, unaware))
    assert seeing == pytest.approx(1000 * float(wide.angles(near).mean()), rel=1e-4)
    assert seeing > 1.1 * blind, (seeing, blind)


def test_a_further_start_begins_with_images_that_match_the_gradient(seen: Observation) -> None:
    run = maps([0, 1], further=1, approach=3, steps=1).begin([seen])
    run.advance()
    run = run.then(run.results())  # type: ignore[assignment]
    assert run.n_steps == 3
    assert isinstance(run.state, MatchingState)
    assert isinstance(run.state.matching.objective, GlobalCosine)
    for _ in range(3):
        run.advance()
    near = run.results()
    following = run.then(near)
    assert following is not None
    assert isinstance(following.state, MatchingState)
    (problem,) = following.state.problems
    begun, expected = problem.images(Pixels()), near[0].images
    apart = (begun.detach()[:, None] - expected).square().flatten(2).mean(2)
    assert sorted(apart.argmin(dim=1).tolist()) == [0, 1]
    assert float(apart.min(dim=1).values.max()) < 1e-12
    # each image stands where the recovered map is that its own is closest to
    penalty = penalty_of(following.state)
    assert float(penalty.angles(begun).sum()) <= float(penalty.angles(begun.flip(0)).sum())


@pytest.mark.parametrize(("alone", "last", "total"), [(False, 5, 6), (True, 4, 9)])
def test_an_interrupted_further_start_ends_with_the_same_bits(
    seen: Observation, tmp_path: Path, alone: bool, last: int, total: int
) -> None:
    by_patches = smoothly(PatchMatching(["trunk.layers.3"], further=2, approach=0), steps=3)
    attack = by_patches if alone else maps([1], further=1, approach=2, steps=2)
    whole = run_attack(attack, [seen], tmp_path / "other", 1000.0, None, lambda state, new: None)
    done: list[int] = []

    def interrupt(state: Any, new: int) -> None:
        done.append(new)
        if sum(done) == last:  # the first iteration of the third run, or of the second
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted):
        run_attack(attack, [seen], tmp_path / "saved", 1000.0, None, interrupt)
    resumed = run_attack(attack, [seen], tmp_path / "saved", 1000.0, None, lambda state, new: done.append(new))
    assert sum(done) == total
    assert torch.equal(resumed.reconstructions[0].images, whole.reconstructions[0].images)
    assert resumed.reconstructions[0].notes == whole.reconstructions[0].notes
    assert resumed.curves == whole.curves
    assert len(whole.curves[0]) >= 3


def test_the_next_attack_gives_the_images_that_are_not_certified(
    seen: Observation, truth: Tensor, stuck_once: Reconstruction
) -> None:
    labels = torch.arange(2)
    other = Told(truth, labels)
    mixed = FirstApplicable([maps([1]), other])(seen)
    assert other.calls == 1
    assert torch.equal(mixed.images[0], stuck_once.images[0])
    missing = 1 - int((truth - mixed.images[0]).square().flatten(1).mean(1).argmin())
    torch.testing.assert_close(mixed.images[1], truth[missing])
    assert mixed.labels.tolist() == [1 - missing, missing]
    assert certified(mixed) == [True, False]  # that attack gives no certificate
    assert any("attack 2 of 2 was tried for 1 of 2 images" in note and "are taken" in note for note in mixed.notes)
    assert mixed.notes[-1] == "told"


def test_the_next_attack_is_left_out_where_it_explains_the_update_no_better(
    seen: Observation, truth: Tensor, stuck_once: Reconstruction
) -> None:
    worse = Told(1 - truth, torch.arange(2).flip(0))
    kept = FirstApplicable([maps([1]), worse])(seen)
    assert worse.calls == 1
    assert torch.equal(kept.images, stuck_once.images)
    assert any("attack 2 of 2 was tried for 1 of 2 images" in note and "are left out" in note for note in kept.notes)
    assert "told" not in kept.notes


def test_the_next_attack_begins_with_the_images_found(seen: Observation, stuck_once: Reconstruction) -> None:
    attacks = [maps([1]), smoothly(MapMatching(further=0)), GradientMatching(steps=1)]
    run = FirstApplicable(attacks).begin([seen])
    while run.state is not None and run.state.step < run.n_steps:
        run.advance()
    following = run.then(run.results())
    assert following is not None
    assert isinstance(following.state, MatchingState)
    (problem,) = following.state.problems
    order = penalty_of(following.state).in_order(stuck_once.images)
    begun = Pixels(box=False, smooth=0.5).images(problem.variables, problem.restart)
    torch.testing.assert_close(begun.detach(), stuck_once.images[order], rtol=1e-4, atol=1e-4)
    # what is certified stays as it is
    following.advance()
    [found] = following.results()
    kept = int(order.tolist().index(0))
    assert torch.equal(problem.images(Pixels(box=False, smooth=0.5))[kept], stuck_once.images[0])
    assert not torch.equal(problem.images(Pixels(box=False, smooth=0.5))[1 - kept], stuck_once.images[1])
    assert torch.equal(found.images[kept], stuck_once.images[0])


def smoothly(features: MapMatching | PatchMatching, steps: int = 1) -> GradientMatching:
    smooth = Pixels(box=False, spread=0.2, smooth=0.5)
    return GradientMatching(
        FeaturesOnly(), features=features, parametrization=smooth, solver=LBFGS(history=20), steps=steps
    )


def test_further_starts_of_a_batch_on_patches_search_for_each_image_then_for_those_that_are_missing(
    seen: Observation, truth: Tensor
) -> None:
    none = torch.zeros(len(truth), dtype=torch.bool)
    mirrored = torch.cat([truth[:1], truth[1:].flip(3)])
    repeated = torch.cat([truth[:1], truth[:1] + 0.01 * torch.randn_like(truth[:1])])
    for images, missing in ((truth, []), (mirrored, [1]), (repeated, [1])):
        attack = smoothly(PatchMatching(["trunk.layers.3"], further=2, approach=0))
        first = attack.begin([seen])
        found = [Reconstruction(images, torch.zeros(2, dtype=torch.int64), 1.0, certified=none)]
        following = attack._further(first, 1, found, StartsSoFar())
        assert following is not None
        assert isinstance(following.state, MatchingState)
        assert [one.within.places.tolist() for one in following.state.problems if one.within] == [[0], [1]]
        begun = torch.cat([one.images(attack.parametrization).detach() for one in following.state.problems])
        torch.testing.assert_close(begun, images, rtol=0, atol=1e-4)
        following.advance()
        assert "further start 1, 2 of 2 images each by itself from that found" in " ".join(following.results()[0].notes)
        following = attack._further(first, 2, found, StartsSoFar())
        assert following is not None
        assert isinstance(following.state, MatchingState)
        if not missing:
            assert len(following.state.problems) == 2
            continue
        (problem,) = following.state.problems
        assert problem.within is not None
        assert problem.within.places.tolist() == missing
        assert not torch.allclose(problem.images(attack.parametrization), images[missing], atol=0.1)
        following.advance()
        [tried] = following.compute()
        # the other image stays as it is
        assert torch.equal(tried.images[0], images[0])
        assert "further start 2, 1 of 2 images from random ones" in " ".join(tried.notes)


def test_certified_images_are_not_sought_again(seen: Observation, truth: Tensor) -> None:
    attack = smoothly(PatchMatching(["trunk.layers.3"], further=1, approach=0))
    certified = torch.tensor([True, False])
    found = [Reconstruction(truth, torch.zeros(2, dtype=torch.int64), 1.0, certified=certified)]
    following = attack._further(attack.begin([seen]), 1, found, StartsSoFar())
    assert following is not None
    assert isinstance(following.state, MatchingState)
    assert [one.within.places.tolist() for one in following.state.problems if one.within] == [[1]]


def test_without_further_starts_a_batch_is_sought_together_to_the_end(seen: Observation) -> None:
    ends = []
    for further in (0, 1):
        attack = smoothly(PatchMatching(["trunk.layers.3"], further=further, approach=0))
        state = attack.begin([seen]).state
        assert isinstance(state, MatchingState)
        penalty = state.problems[0].feature_penalty
        assert isinstance(penalty, PatchPenalty)
        ends.append(penalty.enough)
    assert ends[0] < 1e-5 < 0.01 < ends[1]


def test_a_single_image_that_is_stuck_begins_anew(seen: Observation, truth: Tensor) -> None:
    images, none = truth[1:].flip(3), torch.zeros(1, dtype=torch.bool)
    run = smoothly(PatchMatching(["trunk.layers.3"], further=1, approach=0)).begin([replace(seen, n_examples=1)])
    run.advance()
    following = run.then([Reconstruction(images, torch.zeros(1, dtype=torch.int64), 1.0, certified=none)])
    assert following is not None
    assert isinstance(following.state, MatchingState)
    (problem,) = following.state.problems
    begun = Pixels(box=False, smooth=0.5).images(problem.variables, problem.restart)
    assert not torch.allclose(begun, images, atol=1e-4)
    following.advance()
    notes = following.results()[0].notes
    assert any("further start 1, from random images: patches leave" in note for note in notes)


def test_maps_of_another_image_certify_nothing(
    seen: Observation, truth: Tensor, photographs: Tensor, model: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = photographs[5:7, :, ::4, ::4]
    wrong = MapRecovery()(observed(others, model))
    monkeypatch.setattr(MapRecovery, "__call__", lambda self, observation: wrong)
    penalty = MapMatching().prepare(seen).with_labels(torch.arange(2))
    images = others[penalty.in_order(others)]
    assert float(penalty.angles(images).max()) < ANGLE  # the images do have these maps
    found, _, notes = penalty.certificate(images, torch.arange(2))
    assert found.tolist() == [False, False]
    assert all("the update of the images is not the observed one" in note for note in notes)
    result = maps()(seen)
    assert certified(result) == [False, False]
    # one image alone has its map: without the maps' own evidence nothing can be said
    found, _, notes = penalty.certificate(torch.stack([images[0], truth[0]]), torch.arange(2))
    assert found.tolist() == [False, False]
    assert "the update cannot confirm" in notes[0]
    monkeypatch.setattr(matching, "EXPLAINED", 2.0)
    assert penalty.certificate(images, torch.arange(2))[0].tolist() == [True, True]


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_maps_of_nothing_certify_nothing(
    truth: Tensor, model: Backbone, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = observed(truth, model, mode)
    right = MapRecovery()(seen)
    noise = torch.rand(right.maps.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    wrong = nn.functional.normalize(noise.flatten(1), dim=1).view_as(noise)
    monkeypatch.setattr(
        MapRecovery,
        "__call__",
        lambda self, observation: right.__class__(
            right.convolution, wrong, right.outside, right.next_outside, right.negative, right.support
        ),
    )
    result = maps(steps=3, further=1)(seen)
    assert certified(result) == [False, False]


def test_a_rehearsal_and_a_measurement_follow_no_maps(seen: Observation, monkeypatch: pytest.MonkeyPatch) -> None:
    def followed(*_: object) -> None:
        raise AssertionError("maps were followed")

    monkeypatch.setattr(upstream, "nearest_maps", followed)
    attack = GradientMatching(FeaturesOnly(), features=MapMatching(), steps=2)
    attack.rehearse([seen])
    assert attack.measured_execution([seen, seen]) in ("loop", "vmap")
    with pytest.raises(AssertionError, match="maps were followed"):
        attack.begin([seen])


def test_settings_out_of_range_are_refused() -> None:
    for settings in ({"further": -1}, {"approach": -1}):
        with pytest.raises(Exception, match="further and approach of at least 0"):
            MapMatching(**settings)
