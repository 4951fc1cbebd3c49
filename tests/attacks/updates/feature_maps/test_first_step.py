"""Patches of the first of several local steps, which lie in the span of the update."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from lit_recon.attacks.updates import PatchMatching
from lit_recon.attacks.updates.feature_maps import patches
from lit_recon.attacks.updates.feature_maps.patch_penalty import PatchPenalty
from lit_recon.attacks.updates.feature_maps.spans import SpanRows, spans_of_first_step
from lit_recon.clients import Client, GradientOperator, LocalSteps
from lit_recon.defenses import GradientDropout
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
from tests.attacks.updates.feature_maps.patch_victims import Rule, attack, victim
from tests.attacks.updates.feature_maps.test_local_steps import local
from tests.attacks.updates.feature_maps.test_patches import Normed


def adam(model: nn.Module, batch_norm: BatchNormMode, loss: Loss) -> ForwardOperator:
    return LocalSteps(model, 3, 0.01, batch_norm=batch_norm, loss=loss, optimizer="adam")


def behind_statistics(images: Tensor, rule: Rule) -> Observation:
    """An update of local steps with statistics of the batch behind the convolution."""
    torch.manual_seed(0)
    client = Client(Backbone(Normed(), 5, Normalization((0.5,) * 3, (0.25,) * 3)), "train", rule=rule)
    return client.observe(images, torch.arange(len(images)), Knowledge(), torch.Generator().manual_seed(0))


def span_of(seen: Observation) -> SpanRows:
    penalty = PatchMatching().prepare(seen)
    [span] = penalty.searched.rows
    assert isinstance(span, SpanRows)
    return span


def outside(penalty: PatchPenalty, images: Tensor) -> float:
    """Mean of the squared sines of the angles between patches and the span, without the search's formulas."""
    [span], [own] = penalty.searched.rows, penalty.searched.patches(images)
    assert isinstance(span, SpanRows)
    own = own.double()
    if span.centered:
        groups = own.view(span.centered, -1, own.shape[1])
        own = (groups - groups.mean(1, keepdim=True)).flatten(0, 1)
    _, values, right = torch.linalg.svd(own, full_matrices=False)
    basis = right[: span.patches]
    assert float(values[span.patches - 1]) > 1e-4 * float(values[0])
    cosines = torch.linalg.svdvals(basis @ span.values.double().T)
    return float((1 - cosines.square()).mean())


@pytest.mark.parametrize("clients", [1, 2])
@pytest.mark.parametrize("lr", [0.01, 0.3])
def test_patches_of_the_first_step_lie_in_the_span(images: Tensor, lr: float, clients: int) -> None:
    # one image of each client; without momentum weights leave the straight line at the largest rate
    seen = victim(images[:clients], None, rule=local(2, clients=clients, lr=lr))
    penalty = PatchMatching().prepare(seen)
    assert not penalty.on_a_line
    assert span_of(seen).patches == 16 * clients
    # directions of 1e-4 are left out, and the weakest of the first step is 0.015 of the strongest: 4e-5 measured
    assert penalty.searched.left(images[:clients]) < 2e-4
    for wrong in (images[:clients].flip(2), 0.5 * images[:clients].flip(3) + 0.2):
        measured = penalty.searched.left(wrong)
        assert measured > 0.005
        assert measured == pytest.approx(outside(penalty, wrong), rel=1e-4)


@pytest.mark.parametrize("clients", [1, 2])
def test_statistics_of_each_client_take_its_mean_patch_out_of_the_span(
    photographs: Tensor, clients: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = photographs[:2, :, ::4, ::4].contiguous()
    seen = behind_statistics(images, local(2, clients=clients, lr=0.1))
    penalty = PatchMatching().prepare(seen)
    assert span_of(seen).centered == clients
    assert penalty.searched.left(images) < 2e-4
    wrong = images.flip(2)
    assert penalty.searched.left(wrong) == pytest.approx(outside(penalty, wrong), rel=1e-3)
    [span] = penalty.searched.rows
    whole = replace(penalty.searched, rows=(replace(span, centered=0, patches=span.patches + clients),))
    assert whole.left(images) > 1e-3


@pytest.mark.parametrize("statistics", [False, True])
def test_the_share_outside_is_differentiable(images: Tensor, statistics: bool) -> None:
    rule = local(2, lr=0.1)
    seen = behind_statistics(images, rule) if statistics else victim(images[:1], None, rule=rule)
    penalty = PatchMatching().prepare(seen)
    for inputs in penalty.searched.passes._inputs:
        vars(inputs).update(vars(inputs.doubled()))
    start = (0.9 * images[: len(images) if statistics else 1] + 0.05).double().requires_grad_()
    (slope,) = torch.autograd.grad(penalty.searched.residual(start), start)
    step = torch.randn(start.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.no_grad():
        ahead, behind = (float(penalty.searched.residual(start + sign * 1e-6 * step)) for sign in (1, -1))
    assert float((slope * step).sum()) == pytest.approx((ahead - behind) / 2e-6, rel=1e-4)


def test_directions_of_rounding_errors_are_left_out(images: Tensor) -> None:
    # a second step of one millionth of the first, in which weights hardly move, is lost in rounding errors
    seen = victim(images[:1], None, rule=local(3, lr=1e-5))
    [rows] = PatchMatching().prepare(seen).judged.rows
    span = span_of(seen)
    assert rows.patches == 48
    assert 16 <= len(span.values) < 32
    everything = SpanRows.of_first_step(replace(rows, values=rows.values.double()), 16, 0, 0.0)
    assert len(span.values) < len(everything.values)


def test_weak_directions_are_left_out(images: Tensor) -> None:
    [rows] = PatchMatching().prepare(victim(images[:1], None, rule=local(2))).judged.rows
    left, values, right = torch.linalg.svd(rows.values.double(), full_matrices=False)
    for weakest, count in ((1e-3, 20), (1e-5, 16)):
        values[:16], values[16:20], values[20:] = 1.0, weakest, 0.0
        some = replace(rows, values=(left * values) @ right)
        assert len(SpanRows.of_first_step(some, 16, 0, 0.0).values) == count


def test_searches_go_on_from_images_near_the_span_and_are_given_up_elsewhere(images: Tensor) -> None:
    penalty = PatchMatching().prepare(victim(images[1:], None, rule=local(3, lr=0.3)))
    near, far = (Reconstruction(x, torch.zeros(1, dtype=torch.int64), 0.0) for x in (images[1:], images[:1]))
    assert [penalty.goes_on(near, fresh) for fresh in (True, False)] == [True, True]
    assert not penalty.goes_on(far, fresh=True)
    closer = penalty.for_further_start(near, True)
    assert closer.searched is penalty.searched
    assert closer.prior_share(0.0) < 1e-6 < penalty.prior_share(0.0)
    # a straight line of weights would leave more, at the true image too
    for left, ended in ((0.001, False), (0.005, True)):
        loss = 0.5 * left * penalty.weight * penalty.searched.squares / (penalty.stds[0] ** 2 * penalty.pixels)
        assert penalty.ended(loss, 0.5) is ended


def test_no_span_is_used_where_it_does_not_hold_all_patches(images: Tensor) -> None:
    def spans(seen: Observation) -> list[SpanRows]:
        return spans_of_first_step(PatchMatching().prepare(seen).judged.rows, seen)

    assert spans(victim(images[:1], None, rule=local(4)))
    assert not spans(victim(images[:1], None, rule=local(5)))  # 80 patches, 64 rows
    assert not spans(victim(images, None, rule=local(2, batches=2)))  # the second image is not in the first step
    assert not spans(victim(images[:1], None, rule=adam))  # its steps are no sums of patches
    assert not spans(victim(images[:1], GradientDropout(0.3), rule=local(2)))
    assert not spans(victim(images[:1], None, rule=GradientOperator))


@pytest.mark.parametrize(("lr", "count"), [(0.01, 1), (0.3, 1), (0.3, 2)])
def test_images_behind_local_steps(images: Tensor, lr: float, count: int) -> None:
    seen = victim(images[-count:], None, rule=local(2, lr=lr))
    result = attack(20, further=4)(seen)
    assert (
        float(min((found - images[-count:]).square().mean() for found in (result.images, result.images.flip(0)))) < 3e-5
    )
    assert result.certified is not None
    assert result.certified.all()
    assert any("first local step" in note for note in result.notes)


def test_images_that_training_does_not_explain_are_not_certified(
    images: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = victim(images[:1], None, rule=local(2, lr=0.3))
    labels = torch.zeros(1, dtype=torch.int64)
    certified, _, _ = PatchMatching().prepare(seen).certificate(images[:1], labels)
    assert certified is not None
    assert certified.all()
    # the same weights before, other ones after training
    moved = {name: value + 0.02 * value.abs().mean() * torch.randn_like(value) for name, value in seen.update.items()}
    other = replace(seen, update=moved)
    certified, _, _ = PatchMatching().prepare(other).certificate(images[:1], labels)
    assert certified is not None
    assert not certified.any()
    # a straight line is not the way on which these weights moved
    monkeypatch.setattr(patches.PatchPenalty, "explained_by", lambda self, *_: self.judged)
    certified, _, _ = PatchMatching().prepare(seen).certificate(images[:1], labels)
    assert certified is not None
    assert not certified.any()
