"""The attack needs the initial weights: with them it finds the image, without them no more than the mean image."""

from __future__ import annotations

import dataclasses

from lit_recon.attacks.released.kernel_ridge import KernelRidge
from lit_recon.attacks.shadow import GradientDescent, Initialization, ShadowPlan
from lit_recon.data import InformedSplitSettings, draw_informed_split
from lit_recon.data.sources import Digits
from lit_recon.models.released import ReleasedMLP


def test_unknown_initial_weights_leave_the_mean_image() -> None:
    split = draw_informed_split(Digits(), InformedSplitSettings(fixed=80, shadow=300, targets=60))
    plan = ShadowPlan(ReleasedMLP((1, 8, 8), 10, [10]), split.fixed, GradientDescent(steps=40))
    shadow, targets = split.shadow.pixels(), split.targets.pixels()
    mean_image = float((shadow.mean(0) - targets).square().mean())
    attack = KernelRidge(ridges=(1e-5, 1e-3, 1e-1, 1.0, 10.0))

    def error(initialization: Initialization) -> float:
        own = dataclasses.replace(plan, initialization=initialization)
        released = dataclasses.replace(own, purpose="released")
        reference = own.reference()
        fitted = attack.fitted(
            own.train(split.shadow, range(300), "batched_mlp", reference), shadow, split.shadow.labels, 10
        )
        observed = released.train(split.targets, range(60), "batched_mlp", reference)
        return float((fitted.reconstruct(observed).images - targets).square().mean())

    assert error("known") < 0.5 * mean_image
    # No better than guessing, and no worse: the attack finds out by itself that it knows nothing.
    assert 0.97 < error("fresh") / mean_image < 1.05
