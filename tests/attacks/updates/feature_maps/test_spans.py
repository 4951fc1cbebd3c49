"""Images of a batch that are sought one by one in the known span of its patches."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from lit_recon.attacks.updates import PatchMatching
from lit_recon.attacks.updates.feature_maps import input_map, patch_penalty
from lit_recon.attacks.updates.feature_maps.patch_penalty import PatchPenalty
from lit_recon.attacks.updates.feature_maps.spans import for_some, misplaced_images, outside_shares, spanned
from lit_recon.attacks.updates.gradient_matching.further import StartsSoFar
from lit_recon.clients import Client
from lit_recon.defenses import Defense, GradientDropout
from lit_recon.models import Backbone
from lit_recon.records import Knowledge, Normalization, Observation, Reconstruction
from tests.attacks.updates.feature_maps.networks import Shallow, backbone
from tests.attacks.updates.feature_maps.patch_victims import attack, two_clients, victim
from tests.attacks.updates.feature_maps.test_further import smoothly


@pytest.fixture(scope="module")
def truth(photographs: Tensor) -> Tensor:
    return photographs[:2, :, ::4, ::4]


@pytest.fixture(scope="module")
def seen(truth: Tensor) -> Observation:
    return victim(truth, None)


@pytest.fixture(scope="module")
def penalty(seen: Observation) -> PatchPenalty:
    return PatchMatching().prepare(seen)


def unfolded(seen: Observation, images: Tensor) -> Tensor:
    """Patches `(n, places, c k k)` in front of the only convolution with few of them, without the search's code."""
    reached: list[Tensor] = []
    layer = seen.model.trunk.layers[3]
    handle = layer.register_forward_pre_hook(lambda _, given: reached.append(given[0]))
    with torch.no_grad():
        seen.model(images)
    handle.remove()
    return nn.functional.unfold(reached[0], layer.kernel_size, padding=layer.padding, stride=layer.stride).mT.double()


def test_shares_are_those_of_an_independent_projection(seen: Observation, penalty: PatchPenalty, truth: Tensor) -> None:
    own = unfolded(seen, truth)
    basis = torch.linalg.svd(own.flatten(0, 1), full_matrices=False)[2]
    other = torch.cat([truth[:1], truth[1:].flip(3)])
    moved = unfolded(seen, other)
    expected = (moved - moved @ basis.T @ basis).square().sum((1, 2)) / moved.square().sum((1, 2))
    found = outside_shares(penalty.alone, other)
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-7)
    assert float(found[0]) < 1e-6 < 1e-3 < float(found[1])


def test_shares_are_differentiable(seen: Observation, truth: Tensor) -> None:
    alone = for_some(PatchMatching().prepare(seen).searched, 1)
    for inputs in alone.passes._inputs:
        vars(inputs).update(vars(inputs.doubled()))
    start = (0.9 * truth + 0.05).double().requires_grad_()
    rows = tuple(type(one)(**{**vars(one), "values": one.values.double()}) for one in alone.rows)
    alone = type(alone)(rows, alone.passes)
    (slope,) = torch.autograd.grad(outside_shares(alone, start).sum(), start)
    step = torch.randn(start.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.no_grad():
        ahead, behind = (float(outside_shares(alone, start + sign * 1e-6 * step).sum()) for sign in (1, -1))
    assert float((slope * step).sum()) == pytest.approx((ahead - behind) / 2e-6, rel=1e-4)


def test_known_images_are_taken_out(penalty: PatchPenalty, truth: Tensor) -> None:
    rest = for_some(penalty.searched, 1, truth[:1])
    [row] = rest.rows
    assert row.known is not None
    assert len(row.values) == 16
    assert float((row.values @ row.known.T).abs().max()) < 1e-4
    # of the missing image nothing is outside of what is left; the image that is known is of no use
    assert rest.left(truth[1:]) < 1e-4
    assert rest.left(truth[:1]) > 0.1
    both = for_some(penalty.searched, 2)
    assert both.left(truth) < 1e-4 < 0.05 < both.left(torch.cat([truth[:1], truth[:1] + 0.01]))


def test_misplaced_images_are_outside_or_repeated(penalty: PatchPenalty, truth: Tensor) -> None:
    for images, expected in (
        (truth, [False, False]),
        (torch.cat([truth[:1], truth[:1] + 0.01]), [False, True]),
        (torch.cat([truth[:1], truth[1:].flip(3)]), [False, True]),
    ):
        assert misplaced_images(penalty.searched, images, 2e-3).tolist() == expected  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def informed(truth: Tensor) -> Observation:
    """Behind statistics of the batch that the attacker knows."""
    return victim(truth, None, mode="train", knowledge=Knowledge(batch_norm="batch"))


def test_known_statistics_leave_differences_of_every_image_in_the_span(informed: Observation, truth: Tensor) -> None:
    norm = informed.model.trunk.layers[1]
    reached: list[Tensor] = []
    handle = norm.register_forward_pre_hook(lambda _, given: reached.append(given[0]))
    with torch.no_grad():
        informed.model(truth)
    handle.remove()
    model = copy.deepcopy(informed.model)
    model.trunk.layers[1].running_mean.copy_(reached[0].mean((0, 2, 3)))
    model.trunk.layers[1].running_var.copy_(reached[0].var((0, 2, 3), unbiased=False))
    fixed = replace(informed, model=model)
    # no norm stands behind this convolution, so that its gradient has all directions
    basis = torch.linalg.svd(unfolded(fixed, truth).flatten(0, 1), full_matrices=False)[2]
    other = torch.cat([truth[:1], truth[1:].flip(3)])
    moved = unfolded(fixed, other)
    moved = moved - moved.mean(1, keepdim=True)
    expected = (moved - moved @ basis.T @ basis).square().sum((1, 2)) / moved.square().sum((1, 2))
    penalty = PatchMatching().prepare(informed)
    assert penalty.separable
    found = outside_shares(penalty.alone, other)
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-6)
    assert float(found[0]) < 1e-5 < 1e-3 < float(found[1])
    rest = for_some(penalty.searched, 1, truth[:1])
    assert rest.left(truth[1:]) < 1e-3 < 0.1 < rest.left(truth[:1])
    # a wrong image moves the mean of the batch, but not that of the others
    assert penalty.misplaced(Reconstruction(other, torch.arange(2), 0.0)).tolist() == [False, True]  # type: ignore[union-attr]
    certified, _, notes = penalty.certificate(other, torch.arange(2))
    assert certified is not None
    assert certified.tolist() == [True, False], notes


def test_behind_a_norm_with_known_statistics_one_direction_is_missing(photographs: Tensor) -> None:
    images, model = photographs[1:3], backbone()
    seen = Client(model, "train").observe(images, torch.arange(2), Knowledge(batch_norm="batch"))
    penalty = PatchMatching().prepare(seen)
    places = [one.layer.places for one in penalty.searched.rows]
    spans = for_some(penalty.searched, 1).rows
    assert [len(one.values) for one in spans] == [2 * own - 1 for own in places]
    other = torch.cat([images[:1], images[1:].flip(3)])
    left = outside_shares(for_some(penalty.searched, 1), other)
    assert float(left[0]) < 1e-6 < 0.01 < float(left[1])
    rest = for_some(penalty.searched, 1, images[:1])
    assert rest.left(images[1:]) < 1e-4 < 0.1 < rest.left(images[:1])
    # more missing directions, as of inactive channels, say nothing about the true images: only one may be missing
    assert misplaced_images(penalty.searched, images, 2e-3).tolist() == [False, False]  # type: ignore[union-attr]
    longest = [one.values.norm(dim=1).argsort(descending=True) for one in penalty.searched.rows]
    fewer = tuple(
        replace(one, values=one.values[order[: one.patches - 2]])
        for one, order in zip(penalty.searched.rows, longest, strict=True)
    )
    assert misplaced_images(replace(penalty.searched, rows=fewer), images, 2e-3) is None
    # with its mean, a patch is not inside
    whole = for_some(penalty.searched, 1)
    rows = tuple(replace(one, centered=0, patches=one.patches + 1) for one in whole.rows)
    assert float(outside_shares(replace(whole, rows=rows), images)[0]) > 1e-3  # measured 8e-3


def test_every_client_has_its_own_mean(photographs: Tensor) -> None:
    images = photographs[1:5]
    client = Client(backbone(), "train", rule=two_clients)
    seen = client.observe(images, torch.arange(4) % 3, Knowledge(), torch.Generator().manual_seed(0))
    penalty = PatchMatching().prepare(seen)
    assert not penalty.separable
    for some, expected in (
        (images, [False] * 4),
        (torch.cat([images[:3], images[3:].flip(3)]), [False, False, True, True]),
    ):
        found = penalty.misplaced(Reconstruction(some, torch.arange(4), 0.0))
        assert found is not None
        # statistics of the second client are those of both of its images
        assert found.tolist() == expected


def test_images_with_more_patches_than_rows_are_sought_together(penalty: PatchPenalty, informed: Observation) -> None:
    searched = penalty.searched
    assert penalty.separable
    assert spanned(searched)
    more = tuple(replace(one, patches=len(one.values) + 1) for one in searched.rows)
    assert not spanned(replace(searched, rows=more))
    assert not replace(penalty, searched=replace(searched, rows=more)).separable
    # of single places no difference is left
    told = PatchMatching().prepare(informed).searched
    single = tuple(replace(one, layer=replace(one.layer, places=1)) for one in told.rows)
    assert spanned(told)
    assert not spanned(replace(told, rows=single))


@pytest.mark.parametrize(("silent", "known"), [(10, True), (20, False)])
def test_channels_without_a_gradient_span_nothing(photographs: Tensor, silent: int, known: bool) -> None:
    """Of 64 channels at least 48 have to have a gradient, for 3 images with 16 patches each."""
    images, labels = photographs[:3, :, ::4, ::4], torch.arange(3)
    torch.manual_seed(0)
    model = Backbone(Shallow(8, 64), 5, Normalization((0.5,) * 3, (0.25,) * 3)).eval()
    with torch.no_grad():
        model.head.weight.view(5, 64, 16)[:, :silent] = 0
    penalty = PatchMatching().prepare(Client(model, defense=Defense()).observe(images, labels, Knowledge(defense=True)))
    assert penalty.separable == known
    misplaced = penalty.misplaced(Reconstruction(images, labels, 0.0))
    assert misplaced is None if not known else misplaced.tolist() == [False] * 3
    certified, _, notes = penalty.certificate(images, labels)
    assert certified is not None
    assert certified.tolist() == [True] * 3, notes


def test_images_with_known_statistics_are_sought_one_by_one(informed: Observation, truth: Tensor) -> None:
    found = attack(steps=8, further=2)(informed)
    assert found.certified is not None
    assert found.certified.tolist() == [True, True], found.notes
    assert any("each by itself" in note for note in found.notes)
    order = (found.images[:, None] - truth[None]).square().mean((2, 3, 4)).argmin(1)
    assert float((found.images - truth[order]).square().mean().sqrt()) < 0.01


def test_single_images_are_certified_by_themselves(seen: Observation, penalty: PatchPenalty, truth: Tensor) -> None:
    labels = torch.arange(2)
    certified, final, _ = penalty.certificate(truth, labels)
    assert certified is not None
    assert certified.tolist() == [True, True]
    assert final
    # another contrast of one image: it is refused, and the other one is certified as before
    wrong = truth.clone()
    wrong[1] += 0.05 * (wrong[1] - wrong[1].mean())
    with pytest.MonkeyPatch.context() as patch:
        for _ in range(2):
            certified, final, notes = penalty.certificate(wrong, labels)
            assert certified is not None
            assert certified.tolist() == [True, False]
            assert not final
            assert any("image 2: not certified" in note for note in notes)
            # where the update of the batch is taken as explained, too
            patch.setattr(patch_penalty, "_LEFT", 1.0)
            patch.setattr(patch_penalty, "EXPLAINED", 2.0)
        patch.setattr(input_map, "_DETERMINED", 1e9)
        assert penalty.certificate(wrong, labels)[0].tolist() == [True, True]


def test_an_image_is_certified_once_and_not_without_maps(penalty: PatchPenalty, truth: Tensor) -> None:
    certified, final, notes = penalty.certificate(torch.cat([truth[:1], truth[:1] + 1e-5]), torch.arange(2))
    assert certified is not None
    assert certified.tolist() == [True, False]
    assert not final
    assert notes[-1] == "image 2: not certified: another image is the same"
    # an image all of whose maps are zero leaves nothing, with any contrast
    certified, _ = input_map.told_apart(torch.zeros(1), torch.zeros(1), 0.02, "{:g}")
    assert certified.tolist() == [False]


def test_starts_that_certify_fewer_images_are_left_and_others_taken(penalty: PatchPenalty, truth: Tensor) -> None:
    wrong, labels = torch.cat([truth[:1], truth[1:].flip(3)]), torch.arange(2)
    one, none = (Reconstruction(wrong, labels, 1.0, certified=torch.tensor([first, False])) for first in (True, False))
    near = Reconstruction(truth, labels, 1.0, certified=torch.tensor([False, False]))
    # wrong images leave more of the gradients, which does not count
    assert torch.equal(penalty.closer(near, one, "again").images, wrong)
    assert torch.equal(penalty.closer(one, near, "again").images, wrong)
    assert torch.equal(penalty.closer(near, none, "again").images, wrong)


def test_starts_go_on_while_they_certify_more_images(seen: Observation, truth: Tensor) -> None:
    attack = smoothly(PatchMatching(["trunk.layers.3"], further=1, approach=0))
    first, labels = attack.begin([seen]), torch.zeros(2, dtype=torch.int64)
    found = [Reconstruction(truth, labels, 1.0, certified=torch.tensor([True, False]))]
    # start 2 follows where start 1 certified the first image, and ends where it was certified before
    assert attack._further(first, 2, found, StartsSoFar(0, 0)) is not None
    assert attack._further(first, 2, found, StartsSoFar(1, 0)) is None
    assert attack._further(first, 2, found, StartsSoFar(1, 1)) is not None
    assert attack._further(first, 3, found, StartsSoFar(1, 1)) is None


def test_a_batch_behind_dropping_is_found_image_by_image(truth: Tensor) -> None:
    found = attack(24, further=5)(victim(truth, GradientDropout(0.3)))
    assert found.certified is not None
    assert found.certified.tolist() == [True, True]
    errors = (found.images[:, None] - truth[None]).square().mean((2, 3, 4)).sqrt().min(0).values
    assert float(errors.max()) < 0.02
    assert any("images each by itself from that found" in note for note in found.notes)
