"""Patches matched to updates of several local steps."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from lit_recon.attacks.updates import PatchMatching
from lit_recon.attacks.updates.feature_maps import patches
from lit_recon.attacks.updates.feature_maps.input_map import Passes, passed_images
from lit_recon.attacks.updates.feature_maps.observed_rows import MatchedRows
from lit_recon.clients import GradientOperator, LocalSteps, SecureAggregation
from lit_recon.defenses import GradientDropout
from lit_recon.records import Batch, BatchNormMode, ForwardOperator, Knowledge, Loss, Reconstruction
from tests.attacks.updates.feature_maps.patch_victims import Rule, attack, two_clients, victim


def local(steps: int, batches: int = 1, clients: int = 1, lr: float = 0.01) -> Rule:
    """Local steps of one client, or of several behind secure aggregation."""

    def rule(model: nn.Module, batch_norm: BatchNormMode, loss: Loss) -> ForwardOperator:
        own = LocalSteps(model, steps, lr, momentum=0.5, batches=batches, batch_norm=batch_norm, loss=loss)
        return SecureAggregation(own, clients) if clients > 1 else own

    return rule


def test_patches_of_every_client_and_local_step(photographs: Tensor) -> None:
    images = photographs[:4, :, ::4, ::4].contiguous()
    seen = victim(images, None, mode="train", rule=local(steps=3, batches=2, clients=2))
    [maps] = PatchMatching(["trunk.layers.3"]).prepare(seen).judged.passes(images)
    model = copy.deepcopy(seen.model)
    inputs: list[Tensor] = []
    model.trunk.layers[3].register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    # two clients have two images each; steps 1 and 3 see the first one, step 2 the second, with momentum 0.5
    path = 1 + 1.5 + 1.75
    for step, share in enumerate((0.0, 1 / path, (1 + 1.5) / path)):
        moved = {name: p - share * 0.01 * path * seen.update[name] for name, p in seen.parameters.items()}
        for client in (0, 1):
            with torch.no_grad():
                torch.func.functional_call(model.train(), moved, (images[2 * client + step % 2][None],))
            assert torch.allclose(maps[2 * step + client], inputs.pop()[0], atol=1e-5)
    assert len(maps) == passed_images(seen) == 6


def test_weights_on_the_way_are_those_of_training(images: Tensor) -> None:
    seen = victim(images, None, rule=local(steps=4))
    way = seen.operator.way(seen.weights, Batch(images, torch.arange(2)))  # type: ignore[attr-defined]
    assert len(way) == 4
    for steps in (1, 2, 3):
        shorter = LocalSteps(seen.model, steps, 0.01, momentum=0.5)
        after = shorter.train(seen.weights, Batch(images, torch.arange(2)))
        for name, value in after.items():
            torch.testing.assert_close(way[steps][name], value)
    assert all(torch.equal(way[0][name], value) for name, value in seen.parameters.items())


@pytest.fixture
def on_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches with weights on a straight line, as where the patches of all steps are more than rows."""
    monkeypatch.setattr(patches, "spans_of_first_step", lambda *_: [])


@pytest.mark.usefixtures("on_a_line")
@pytest.mark.parametrize("lr", [0.01, 0.3])
def test_images_behind_steps_on_a_line(images: Tensor, lr: float) -> None:
    # the patches of all steps are nearly parallel at the smaller rate and differ at the larger one
    result = attack(20, further=4)(victim(images[1:], None, rule=local(3, lr=lr)))
    assert float((result.images - images[1:]).square().mean().sqrt()) < 0.002  # 0.0001 measured
    assert result.certified is not None
    assert result.certified.all()
    # weights on a straight line alone do not certify it: starts with those of training on the images found do
    assert any("further start" in note and "from those found" in note for note in result.notes)


@pytest.mark.usefixtures("on_a_line")
def test_training_on_images_near_the_true_ones_gives_the_weights_on_the_way(images: Tensor) -> None:
    seen = victim(images[1:], None, rule=local(3, lr=0.3))
    roughly = PatchMatching().prepare(seen)
    found = Reconstruction(images[1:], torch.zeros(1, dtype=torch.int64), 0.0)
    exactly = roughly.for_further_start(found, True)
    left = [penalty.judged.left(images[1:]) for penalty in (roughly, exactly)]
    assert left[0] > 100 * left[1], left
    assert exactly.enough == pytest.approx(max(1e-9, 0.1 * left[1]))
    # at the first weights alone even the true patches leave more
    alone = Passes(replace(seen, operator=GradientOperator(seen.model)), ["trunk.layers.3"])
    [rows] = roughly.judged.rows
    first = MatchedRows((replace(rows, patches=rows.patches // 3, passes=1),), alone)
    assert first.left(images[1:]) > 3 * left[0]  # 4.5 times measured


@pytest.mark.usefixtures("on_a_line")
def test_penalty_of_several_steps_is_differentiable(images: Tensor) -> None:
    penalty = PatchMatching().prepare(victim(images[:1], None, rule=local(3, lr=0.1)))
    for inputs in penalty.searched.passes._inputs:
        vars(inputs).update(vars(inputs.doubled()))
    start = (0.9 * images[:1] + 0.05).double().requires_grad_()
    (slope,) = torch.autograd.grad(penalty.searched.residual(start, True), start)
    step = torch.randn(start.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.no_grad():
        ahead, behind = (penalty.searched.residual(start + sign * 1e-5 * step, True) for sign in (1, -1))
        plain = [penalty.searched.residual(start + sign * 1e-5 * step) for sign in (1, -1)]
    along = float((slope * step).sum())
    assert along == pytest.approx(float(ahead - behind) / 2e-5, rel=1e-4)
    # without the ridge's own share it is the derivative of another function
    assert along != pytest.approx(float(plain[0] - plain[1]) / 2e-5, rel=1e-3)


@pytest.mark.parametrize("release", ["gradient", "difference"])
def test_zeros_of_weights_that_hardly_moved_are_observed(images: Tensor, release: str) -> None:
    def rule(model: nn.Module, batch_norm: BatchNormMode, loss: Loss) -> ForwardOperator:
        return LocalSteps(model, 2, 1e-5, release=release, batch_norm=batch_norm, loss=loss)  # type: ignore[arg-type]

    seen = victim(images[:1], None, known=False, rule=rule)
    zeros = float((seen.update["trunk.layers.3.weight"] == 0).double().mean())
    assert zeros > 0.01, zeros
    assert not PatchMatching().prepare(seen).partial
    # as many as dropping makes are not
    assert PatchMatching().prepare(victim(images[:1], GradientDropout(0.2), known=False, rule=rule)).partial


def test_zeros_are_observed_if_the_known_defense_hides_none(images: Tensor) -> None:
    seen = victim(images[:1], None)
    seen.update["trunk.layers.3.weight"][:, :10] = 0.0  # type: ignore[index]
    seen.update["trunk.layers.3.weight"][0, 0] = 1.0  # type: ignore[index]
    assert not PatchMatching().prepare(seen).partial
    assert PatchMatching().prepare(replace(seen, defense=None, knowledge=Knowledge())).partial


@pytest.mark.usefixtures("on_a_line")
def test_a_search_far_from_the_image_is_given_up(images: Tensor) -> None:
    penalty = PatchMatching().prepare(victim(images[1:], None, rule=local(3, lr=0.3)))
    near, far = (Reconstruction(x, torch.zeros(1, dtype=torch.int64), 0.0) for x in (images[1:], images[:1]))
    assert penalty.goes_on(near, fresh=False)
    assert not penalty.goes_on(far, fresh=True)
    assert penalty.for_further_start(far, False) is penalty
    # weights on a line let true images leave more than those of one step may
    for left, ended in ((0.005, False), (0.02, True)):
        loss = 0.5 * left * penalty.weight * penalty.searched.squares / (penalty.stds[0] ** 2 * penalty.pixels)
        assert penalty.ended(loss, 0.5) is ended


@pytest.mark.parametrize(
    ("rule", "most"),
    [(two_clients, 2e-3), (local(2, clients=2), 5e-3), (local(2, batches=2), 2e-2)],
    ids=["clients", "clients with local steps", "mini-batches"],
)
def test_images_of_several_clients_and_mini_batches(images: Tensor, rule: Rule, most: float) -> None:
    result = attack(20, further=4)(victim(images, None, rule=rule))
    errors = (result.images[:, None] - images[None]).square().mean((2, 3, 4)).sqrt()
    assert sorted(errors.argmin(1).tolist()) == [0, 1]
    assert float(errors.min(1).values.max()) < most  # measured at most a third of it
    if rule is two_clients:
        assert result.certified is not None
        assert result.certified.all()
