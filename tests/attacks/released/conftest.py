"""What several attacks on released models are tried on."""

from __future__ import annotations

import dataclasses

import pytest
from torch import Tensor

from lit_recon.attacks.shadow import ShadowPlan
from lit_recon.data import ImageSet, InformedSplit


@pytest.fixture(scope="module")
def models(plan: ShadowPlan, split: InformedSplit) -> tuple[Tensor, Tensor]:
    """Shadow and released models of a module's own plan and split."""

    def trained(purpose: str, images: ImageSet) -> Tensor:
        own = dataclasses.replace(plan, purpose=purpose)
        return own.train(images, range(len(images)), "batched_mlp", plan.reference())

    return trained("shadow", split.shadow), trained("released", split.targets)
