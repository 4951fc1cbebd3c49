"""Where shadow models are kept: folders that no two different stores share."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from lit_recon.attacks.shadow import PrivateDescent
from lit_recon.data.informed_splits import InformedSplitSettings
from lit_recon.experiments.released_attack.settings import ShadowSettings
from lit_recon.experiments.train.shadows import store_folder


def test_every_training_and_every_draw_of_shadow_targets_has_a_folder_of_its_own() -> None:
    settings = ShadowSettings(split=InformedSplitSettings(fixed=20, shadow=30, targets=5))
    more_shadows = dataclasses.replace(settings, split=dataclasses.replace(settings.split, shadow=40))
    more_targets = dataclasses.replace(settings, split=dataclasses.replace(settings.split, targets=6))
    development = dataclasses.replace(settings, split=dataclasses.replace(settings.split, pool="development"))
    descent = dataclasses.replace(settings.descent, dp=PrivateDescent(noise_multiplier=1.0))
    private = dataclasses.replace(settings, descent=descent)

    def folder(of: ShadowSettings) -> Path:
        split = of.drawn()
        return store_folder(of, of.plan(split), split.shadow)

    assert folder(settings).parent == Path("runs/shadows")
    # Further shadow targets go on where the first ones ended; another number of targets gives other ones.
    assert folder(more_shadows) == folder(settings)
    assert len({folder(one) for one in (settings, more_targets, private, development)}) == 4
    split = settings.drawn()
    plan = settings.plan(split)
    # as of another file of the same name, with the same fixed images
    assert store_folder(settings, plan, split.shadow.subset(torch.arange(1, 30))) != folder(settings)
    assert store_folder(dataclasses.replace(settings, store=Path("here")), plan, split.shadow) == Path("here")
