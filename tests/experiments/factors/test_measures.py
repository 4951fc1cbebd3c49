"""What a study measures on released models, against the same by hand."""

from __future__ import annotations

import lit_recon._torchvision

import pytest
import torch
from torch.nn.utils import vector_to_parameters

from lit_recon.attacks.shadow import GradientDescent, ShadowPlan
from lit_recon.data.informed_splits import InformedSplitSettings, draw_informed_split
from lit_recon.data.sources import Digits
from lit_recon.experiments.rero.score import membership_auc
from lit_recon.models.released import ReleasedMLP


def test_membership_is_told_by_the_loss() -> None:
    split = draw_informed_split(Digits(), InformedSplitSettings(fixed=40, shadow=60, targets=3))
    plan = ShadowPlan(ReleasedMLP((1, 8, 8), 10, [8]), split.fixed, GradientDescent(steps=150))
    reference = plan.reference()
    weights = (reference + plan.train(split.targets, range(3), "batched_mlp", reference)).float()
    found = membership_auc(plan, weights, split.fixed, split.shadow)

    areas = []
    for own in weights:
        vector_to_parameters(own, plan.network.parameters())
        members, others = (
            torch.nn.functional.cross_entropy(plan.network(part.pixels()), part.labels, reduction="none").detach()
            for part in (split.fixed, split.shadow)
        )
        less, equal = members[:, None] < others[None], members[:, None] == others[None]
        areas.append(float((less.double() + 0.5 * equal.double()).mean()))
    assert found == pytest.approx(sum(areas) / 3, abs=1e-3)  # rounding changes who is ahead of whom
    assert found > 0.6  # forty images learned by heart
