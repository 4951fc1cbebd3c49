"""The distance of patches of candidates from gradients with noise and with hidden entries."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from lit_recon.attacks.updates import LBFGS, FirstApplicable, GradientMatching, PatchMatching
from lit_recon.attacks.updates.feature_maps import patch_penalty, patches
from lit_recon.attacks.updates.feature_maps.input_map import InputMap, Passes, known_statistics, likely_contrast
from lit_recon.attacks.updates.feature_maps.patch_penalty import PatchPenalty
from lit_recon.clients import Client
from lit_recon.clients.client import LocalTraining
from lit_recon.defenses import (
    DPSGD,
    Chain,
    Defense,
    ExcludedVariables,
    GaussianNoise,
    GradientClipping,
    GradientDropout,
    GradientPruning,
    LaplaceNoise,
    PercentilePrivacy,
)
from lit_recon.errors import ConfigError, UnsupportedModelError
from lit_recon.models import Backbone
from lit_recon.records import Knowledge, Normalization, Reconstruction
from tests.attacks.updates.feature_maps.networks import Shallow, backbone, observed
from tests.attacks.updates.feature_maps.patch_victims import STD, attack, two_clients, victim

#: Clips 5 % and 20 % of the entries of the convolution's gradient, with running and with batch statistics.
GAMMA = 0.05


def misfit(penalty: PatchPenalty, images: Tensor) -> Tensor:
    """The residual in units of the noise."""
    return penalty.judged.residual(images) / penalty.stds[1] ** 2


def by_least_squares(penalty: PatchPenalty, images: Tensor) -> float:
    """The misfit with the most likely derivatives in the outputs, found by a library."""
    total = 0.0
    for rows, given in zip(penalty.judged.rows, penalty.judged.passes(images), strict=True):
        layer = rows.layer
        columns = nn.functional.unfold(given, layer.kernel, padding=layer.padding, stride=layer.stride).double()
        spanning = columns.transpose(1, 2).flatten(0, 1).T
        observed = torch.ones_like(rows.values, dtype=torch.bool) if rows.observed is None else rows.observed
        for gradient, chosen in zip(rows.values.double(), observed, strict=True):
            found = torch.linalg.lstsq(spanning[chosen], gradient[chosen][:, None], driver="gelsd").solution
            total += float((gradient[chosen] - (spanning[chosen] @ found)[:, 0]).square().sum())
    return total / penalty.stds[1] ** 2


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize(
    "defense",
    [GaussianNoise(STD), LaplaceNoise(STD), Chain([GradientClipping(0.3), GaussianNoise(STD / 2)])],
    ids=["normal", "laplace", "clipped"],
)
def test_misfit_is_that_of_noise_at_the_truth_alone(images: Tensor, defense: Defense, mode: str) -> None:
    penalty = PatchMatching().prepare(victim(images, defense, mode=mode))
    # the ridge adds up to 9.3e-6, a thousandth of the standard deviation below
    assert float(misfit(penalty, images)) == pytest.approx(by_least_squares(penalty, images), rel=3e-5)
    deviation = (2 * penalty.freedom) ** 0.5
    excess = (float(misfit(penalty, images)) - penalty.freedom) / deviation
    assert abs(excess) < 4  # at most 0.58 measured
    elsewhere = (float(misfit(penalty, images.flip(3))) - penalty.freedom) / deviation
    assert elsewhere > 100  # 299 measured at the least
    first, last = penalty.stds
    nats = float(penalty.penalty(images, images, 1.0)) * (first / last) ** 2
    assert nats * 2 * penalty.pixels == pytest.approx(excess * deviation, rel=1e-3)


def test_behind_little_noise_the_strongest_rows_are_searched_by(images: Tensor) -> None:
    """Half of the 64 rows tell images apart as all do, and the loss is that of all rows but for a constant."""
    penalty = PatchMatching().prepare(victim(images[:1], GaussianNoise(STD)))
    kept, every = ([len(one.values) for one in part.rows] for part in (penalty.searched, penalty.judged))
    # noise hides 58 % of the first layer's span, and its strongest rows would be noise largely
    assert (kept, every) == ([48, 32], [48, 64])
    near = images[:1] + 0.01 * torch.randn(images[:1].shape, generator=torch.Generator().manual_seed(0))
    first, last = penalty.stds
    ours = [
        float(penalty.penalty(one, one, 1.0)) * 2 * penalty.pixels * (first / last) ** 2 for one in (images[:1], near)
    ]
    theirs = [float(misfit(penalty, one)) - penalty.freedom for one in (images[:1], near)]
    grown = theirs[1] - theirs[0]
    assert grown > 20 * (2 * penalty.freedom) ** 0.5
    assert ours[1] - ours[0] == pytest.approx(grown, rel=0.01)  # measured 1e-4
    assert abs(ours[0] - theirs[0]) < 0.01 * grown


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize(
    "defense",
    [
        GradientPruning(0.7),
        GradientPruning(0.7, "tensor"),
        GradientDropout(0.6),
        Chain([GradientClipping(0.3), GradientPruning(0.7)]),
        PercentilePrivacy(60.0),
        PercentilePrivacy(60.0, gamma=GAMMA),
        PercentilePrivacy(gamma=GAMMA),
    ],
    ids=[
        "pruned",
        "per tensor",
        "dropped",
        "clipped",
        "percentile",
        "percentile and entries clipped",
        "entries clipped",
    ],
)
def test_misfit_of_observed_entries_is_zero_at_the_truth_alone(images: Tensor, defense: Defense, mode: str) -> None:
    penalty = PatchMatching().prepare(victim(images[:1], defense, mode=mode))
    assert penalty.partial
    assert penalty.noise is None
    with torch.no_grad():
        assert float(penalty.judged.residual(images[:1])) < 1e-9 * penalty.judged.squares  # at most 8e-11 measured
        elsewhere = float(misfit(penalty, images[1:]))
        assert elsewhere == pytest.approx(by_least_squares(penalty, images[1:]), rel=1e-4)
        assert float(penalty.judged.residual(images[1:])) > 0.05 * penalty.judged.squares  # at least 0.17 measured


@pytest.mark.parametrize("known", [True, False])
def test_excluded_variables_matter_only_to_the_layers_they_are_of(images: Tensor, known: bool) -> None:
    for names in ("^head", r"layers\.0"):
        penalty = PatchMatching().prepare(victim(images[:1], ExcludedVariables(names), known))
        with torch.no_grad():
            assert float(penalty.judged.residual(images[:1])) < 1e-9 * penalty.judged.squares
            assert float(penalty.judged.residual(images[1:])) > 0.05 * penalty.judged.squares
    with pytest.raises(UnsupportedModelError, match="too few entries of the gradients are left: 0 equations"):
        PatchMatching().prepare(victim(images[:1], ExcludedVariables("layers"), known))


@pytest.mark.parametrize("defense", [GaussianNoise(0.01), GradientPruning(0.7)], ids=["noise", "pruned"])
def test_penalty_is_differentiable(images: Tensor, defense: Defense) -> None:
    penalty = PatchMatching().prepare(victim(images[:1], defense))
    for inputs in penalty.judged.passes._inputs:
        vars(inputs).update(vars(inputs.doubled()))
    start = (0.9 * images[:1] + 0.05).double().requires_grad_()
    (slope,) = torch.autograd.grad(misfit(penalty, start), start)
    step = torch.randn(start.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.no_grad():
        ahead, behind = (misfit(penalty, start + sign * 1e-6 * step) for sign in (1, -1))
    assert float((slope * step).sum()) == pytest.approx(float(ahead - behind) / 2e-6, rel=1e-4)


@pytest.mark.parametrize("defense", [None, GaussianNoise(STD)], ids=["none", "noise"])
def test_contrast_that_the_batch_statistics_hide_is_that_of_public_images(
    images: Tensor, defense: Defense | None
) -> None:
    for mode, hidden in (("train", True), ("eval", False)):
        penalty = PatchMatching().prepare(victim(images[1:], defense, mode=mode))
        mean, std = penalty.observation.normalization.tensors(images)
        pale = mean + 0.2 * (images[1:] - mean)
        settled = (penalty.settled(pale) - mean) / std
        if hidden:
            assert float(settled.square().mean()) == pytest.approx(1.0, rel=1e-4)
            torch.testing.assert_close(settled / settled.norm(), (pale - mean) / (pale - mean).norm())
        else:
            assert torch.equal(penalty.settled(pale), pale)


def test_known_statistics_tell_contrast_and_brightness(images: Tensor) -> None:
    seen = victim(images, None, mode="train", knowledge=Knowledge(batch_norm="batch"))
    other = 0.3 * images + torch.tensor([0.1, -0.05, 0.2]).view(3, 1, 1)
    torch.testing.assert_close(likely_contrast(seen, other), images, atol=1e-4, rtol=0)
    pale = 0.3 * (images - 0.5) + 0.5
    told, hidden = (PatchMatching().prepare(one) for one in (seen, victim(images, None, mode="train")))
    assert told.measure.left(images) < 1e-9
    assert told.measure.left(pale) > 100 * hidden.measure.left(pale)
    assert torch.equal(told.settled(pale), pale)  # nothing is left to guess


def test_known_statistics_stand_in_for_those_of_the_candidates(images: Tensor) -> None:
    """Maps of an image then are the client's at the true batch, and depend on no other image."""
    seen = victim(images, None, mode="train", knowledge=Knowledge(batch_norm="batch"))
    without = victim(images, None, mode="train")
    known, unknown = (InputMap(one, "trunk.layers.3", "train") for one in (seen, without))
    torch.testing.assert_close(known.each(images)[0], unknown.each(images)[0], atol=1e-4, rtol=0)
    torch.testing.assert_close(known.each(images[1:])[0], known.each(images)[0][1:], atol=1e-5, rtol=0)
    assert (unknown.each(images[1:])[0] - unknown.each(images)[0][1:]).abs().max() > 0.1
    (maps, misfit), (_, far) = known.with_misfit(images), known.with_misfit(images[1:])
    _, none = unknown.with_misfit(images)
    assert torch.equal(maps[0], known.each(images)[0])
    assert misfit is not None
    assert far is not None
    assert none is None
    assert float(misfit) < 1e-9 < 1e-3 < float(far)


@pytest.mark.parametrize("told", [True, False])
def test_a_search_with_known_statistics_matches_them(
    images: Tensor, monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    seen = victim(images[1:], None, mode="train", knowledge=Knowledge(batch_norm="batch"))
    other, penalty = 0.9 * images[1:] + 0.05, PatchMatching().prepare(seen)
    if not told:
        monkeypatch.setattr(penalty.searched.passes, "_told", False)
    rows, whole = (float(penalty.searched.residual(other, held=held)) for held in (False, True))
    _, misfit = penalty.searched.passes._inputs[0].with_misfit(other)
    assert misfit is not None
    assert penalty.searched.passes.of(1).with_misfit(other)[1] is None  # statistics are of all images
    expected = float(misfit) * penalty.searched.squares
    assert whole - rows == pytest.approx(expected if told else 0.0, rel=0.02, abs=0.02 * expected)


def test_statistics_are_used_where_they_are_those_of_one_batch_in_training(images: Tensor) -> None:
    known = Knowledge(batch_norm="batch")
    assert known_statistics(victim(images, None, mode="train", knowledge=known)).keys() == {"trunk.layers.1"}
    assert not known_statistics(victim(images, None, mode="eval", knowledge=known))
    assert not known_statistics(victim(images, None, mode="train"))
    for rule in (LocalTraining(steps=2, lr=0.1).operator, two_clients):
        assert not known_statistics(victim(images, None, mode="train", knowledge=known, rule=rule))
    seen = victim(images, None, mode="train", knowledge=known)
    assert not known_statistics(replace(seen, batch_statistics={}))
    seen.model.trunk.layers[1].running_mean = None  # type: ignore[union-attr, index]
    assert not known_statistics(seen)


@pytest.mark.parametrize(("known", "mode"), [("batch", "train"), ("running", "train"), ("running", "eval")])
def test_searches_keep_the_statistics_of_clients_apart(images: Tensor, known: Any, mode: str) -> None:
    told = Knowledge(batch_norm=known)
    seen = victim(images, None, mode=mode, rule=two_clients, knowledge=told, running=mode == "train")
    passes = Passes(seen, ["trunk.layers.3"])
    [maps], misfit = passes.with_misfit(images)
    assert misfit is None
    assert torch.equal(maps, passes(images)[0])
    assert not torch.allclose(maps, InputMap(seen, "trunk.layers.3", "train").each(images)[0], atol=0.1)


def test_known_statistics_behind_the_matched_layers_are_not_matched(images: Tensor) -> None:
    seen = victim(images[1:], None, mode="train", knowledge=Knowledge(batch_norm="batch"))
    penalty = PatchMatching(["trunk.layers.0"]).prepare(seen)
    assert float(penalty.searched.residual(images[1:], held=True)) < 1e-9 * penalty.searched.squares


def test_scale_that_the_attacker_does_not_know(images: Tensor) -> None:
    defense = Chain([GradientClipping(1.0), GaussianNoise(STD)])
    penalty = PatchMatching().prepare(victim(images[:1], defense, known=False))
    # a quarter of the singular values is signal: 6 % too high
    assert penalty.noise.std == pytest.approx(STD, rel=0.12)
    assert "estimated standard deviation" in penalty.notes[0]


def test_nothing_stands_out_of_the_noise(images: Tensor) -> None:
    with pytest.raises(UnsupportedModelError, match="nothing is left of the maps: .* above noise of known"):
        PatchMatching().prepare(victim(images[:1], DPSGD(1.0, 100.0)))
    with pytest.raises(UnsupportedModelError, match="nothing is left of the maps: .* above noise of estimated"):
        PatchMatching().prepare(victim(images[:1], DPSGD(1.0, 100.0), known=False))


def test_noise_decides_which_prior_is_strong_enough(images: Tensor) -> None:
    weak, strong = PatchMatching(most_hidden=0.5), PatchMatching(least_hidden=0.5, most_hidden=None)
    for std, hidden in ((STD, False), (0.1, True), (100.0, True)):
        seen = victim(images[:1], GaussianNoise(std))
        able, unable = (strong, weak) if hidden else (weak, strong)
        assert able.prepare(seen).noise is not None
        much = r"(nothing|\d+% of their span, at least most_hidden=0.5,).*: match gradients with an image prior"
        little = r"only \d+% .*, less than least_hidden=0.5, .*: take PatchMatching with least_hidden 0"
        with pytest.raises(UnsupportedModelError, match=much if hidden else little):
            unable.prepare(seen)
    with pytest.raises(UnsupportedModelError, match="there is no noise to hide the maps"):
        strong.prepare(victim(images[:1], None))
    for wrong in ((1.0, None), (-0.1, 1.0), (0.5, 0.5), (0.0, 1.1), (0.0, 0.0)):
        with pytest.raises(ConfigError, match="least_hidden of at least 0 and below most_hidden"):
            PatchMatching(least_hidden=wrong[0], most_hidden=wrong[1])


@pytest.mark.parametrize("known", [True, False])
def test_too_few_entries_are_left(images: Tensor, known: bool) -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"too few entries of the gradients are left: \d+ equations for 192 pixels"
    ):
        PatchMatching().prepare(victim(images[:1], GradientPruning(0.998), known=known))


@pytest.mark.parametrize("defense", [None, GradientClipping(0.3), GaussianNoise(STD)], ids=["none", "clipped", "noise"])
def test_gradients_of_zeros_make_way_to_the_next_attack(images: Tensor, defense: Defense | None) -> None:
    seen = victim(images[:1], defense)
    vanished = {name: value * (value.ndim < 4) for name, value in seen.update.items()}
    seen = replace(seen, update=vanished)
    with pytest.raises(
        UnsupportedModelError, match=r"too few entries .* 0 equations for 192 pixels, from 0 of 2 layers"
    ):
        PatchMatching().prepare(seen)
    matching = GradientMatching(steps=2, solver=LBFGS(inner=2))
    [found] = FirstApplicable([attack(), matching]).run([seen])
    assert found.images.isfinite().all()
    assert found.certified is None


def test_layers_that_do_not_fit(photographs: Tensor, images: Tensor) -> None:
    seen = victim(images[:1], None)
    with pytest.raises(ConfigError, match=r"'head' is no convolution .*: trunk.layers.0, trunk.layers.3"):
        PatchMatching(["head"]).prepare(seen)
    crowded = victim(photographs[:30, :, ::4, ::4].contiguous(), None)
    with pytest.raises(UnsupportedModelError, match="fewer patches in a batch of 30"):
        PatchMatching().prepare(crowded)
    for settings in (
        {"layers": []},
        {"weight": 0.0},
        {"tempered": 0.0},
        {"tempered": 1.5},
        {"further": -1},
        {"approach": -1},
    ):
        with pytest.raises(ConfigError, match="PatchMatching needs (a weight above 0, tempered|further and approach)"):
            PatchMatching(**settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="but not on maps or patches"):
        PatchMatching().prepare(seen).condition(torch.zeros(1))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["eval", "train"])
def test_single_images_are_sought_by_the_first_layer_that_tells_enough(
    photographs: Tensor, mode: Literal["eval", "train"]
) -> None:
    penalty, batch = (
        PatchMatching().prepare(observed(photographs[:n], backbone(), mode, GradientDropout(0.3))) for n in (1, 2)
    )
    (rows,) = penalty.searched.rows
    assert rows.observed is None
    assert rows.equations >= patch_penalty.AMPLE * penalty.pixels
    names = [one.layer.name for one in penalty.judged.rows]
    assert 0 < names.index(rows.layer.name) < len(names) - 1  # layers behind it are not passed, but judge the images
    assert f"sought by the patches of {rows.layer.name}" in penalty.notes[0]
    assert penalty.searched.left(photographs[:1]) < 1e-6 < 1e-2 < penalty.searched.left(photographs[1:2])
    assert len(batch.searched.rows) > 1


class Normed(Shallow):
    """With a BatchNorm behind the convolution whose gradient gives its input away."""

    def __init__(self) -> None:
        super().__init__(8, 64)
        self.layers.append(nn.BatchNorm2d(64))


def misplaced(penalty: PatchPenalty, *batch: Tensor) -> list[bool] | None:
    found = penalty.misplaced(Reconstruction(torch.stack(batch), torch.zeros(len(batch), dtype=torch.int64), 0.0))
    return None if found is None else [bool(one) for one in found]


def test_images_outside_the_span_and_repeated_ones_are_misplaced(
    images: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    penalty = PatchMatching().prepare(victim(images, None))
    assert misplaced(penalty, *images) == [False, False]
    assert misplaced(penalty, images[1], images[0] + 0.005) == [False, False]
    assert misplaced(penalty, images[0], images[1].flip(2)) == [False, True]
    assert misplaced(penalty, images[0], images[0] + 0.005) == [False, True]
    monkeypatch.setattr(patches, "completed_rows", lambda *_: None)
    masked = PatchMatching().prepare(victim(images, GradientDropout(0.3)))
    assert masked.partial
    assert misplaced(masked, *images) is None


def test_statistics_of_the_batch_take_the_mean_patch_out_of_the_span(
    images: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    client = Client(Backbone(Normed(), 5, Normalization((0.5,) * 3, (0.25,) * 3)), "train")
    seen = client.observe(images, torch.tensor([0, 1]), Knowledge(), torch.Generator().manual_seed(0))
    penalty = PatchMatching().prepare(seen)
    assert misplaced(penalty, *images) == [False, False]
    assert misplaced(penalty, images[0], images[1].flip(2)) != [False, False]
    monkeypatch.setattr(penalty.searched.passes, "means", 0)
    assert misplaced(penalty, *images) != [False, False]


def test_images_that_go_on_do_so_without_more_noise_and_further(images: Tensor) -> None:
    penalty = PatchMatching().prepare(victim(images, None))
    near, mirrored = (Reconstruction(x, torch.zeros(2), 0.0) for x in (images + 0.001, images.flip(2)))
    closer = penalty.for_further_start(near, True)
    assert closer.prior_share(0.0) < 1e-6 < penalty.prior_share(0.0)
    assert closer.enough == pytest.approx(0.1 * penalty.searched.left(near.images))
    assert penalty.for_further_start(near, False) is penalty
    assert penalty.for_further_start(mirrored, True) is penalty
