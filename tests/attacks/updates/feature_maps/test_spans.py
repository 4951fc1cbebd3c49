"""Images of a batch that are sought one by one in the known span of its patches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lit_recon.attacks.updates import PatchMatching
from lit_recon.attacks.updates.feature_maps import input_map, patch_penalty
from lit_recon.attacks.updates.feature_maps.patch_penalty import PatchPenalty
from lit_recon.attacks.updates.feature_maps.spans import for_some, misplaced_images, outside_shares
from lit_recon.attacks.updates.gradient_matching.further import StartsSoFar
from lit_recon.defenses import GradientDropout
from lit_recon.records import Observation, Reconstruction
from tests.attacks.updates.feature_maps.patch_victims import attack, victim
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
        assert misplaced_images(penalty.searched, images, False, 2e-3).tolist() == expected


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
