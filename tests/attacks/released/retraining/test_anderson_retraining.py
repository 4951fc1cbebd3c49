"""Trainings repeated on ever better guesses end in the unknown image itself, and the adversary can tell."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lit_recon.attacks.released import AndersonRetraining, Background, FirstLayerRidge
from lit_recon.attacks.released.base import ReconstructedTargets, Reconstructor
from lit_recon.attacks.shadow import GradientDescent, PrivateDescent, ShadowPlan, train_models
from lit_recon.data import ImageSet, InformedSplit, InformedSplitSettings, draw_informed_split
from lit_recon.data.sources import Digits
from lit_recon.errors import ConfigError, CorruptFileError, ThreatModelError, UnsupportedModelError
from lit_recon.models.released import ReleasedCNN, ReleasedMLP


@pytest.fixture(scope="module")
def split() -> InformedSplit:
    return draw_informed_split(Digits(), InformedSplitSettings(fixed=100, shadow=200, targets=20, pool="all"))


@pytest.fixture(scope="module")
def plan(split: InformedSplit) -> ShadowPlan:
    return ShadowPlan(ReleasedMLP((1, 8, 8), 10, [10]), split.fixed, GradientDescent(steps=40))


def fit(attack: AndersonRetraining, plan: ShadowPlan, split: InformedSplit, shadows: Tensor) -> Reconstructor:
    return attack.bind(Background(plan)).fitted(shadows, split.shadow.pixels(), split.shadow.labels, 10)


def test_what_is_certified_is_the_image_itself(
    plan: ShadowPlan, split: InformedSplit, models: tuple[Tensor, Tensor]
) -> None:
    fitted = fit(AndersonRetraining(), plan, split, models[0])
    found = fitted.reconstruct(models[1])
    errors = (found.images - split.targets.pixels()).square().mean((1, 2, 3))
    assert found.certified is not None
    assert found.certified.float().mean() > 0.8  # measured 1
    assert errors[found.certified].max() < 1e-4  # measured 2e-7
    assert torch.equal(found.certified, found.uncertainty <= 1e-2)
    first = FirstLayerRidge().bind(Background(plan))
    guess = first.fitted(models[0], split.shadow.pixels(), split.shadow.labels, 10).reconstruct(models[1])
    assert errors.mean() < 0.2 * (guess.images - split.targets.pixels()).square().mean()
    assert torch.equal(found.labels, guess.labels)
    assert fitted.facts["rank_one_share"] > 0.8
    assert "certified if the retrained weights differ" in fitted.notes[-1]


def test_the_distance_is_that_of_the_weights(
    plan: ShadowPlan, split: InformedSplit, models: tuple[Tensor, Tensor]
) -> None:
    fitted = fit(AndersonRetraining(steps=3, restarts=0), plan, split, models[0])
    found = fitted.reconstruct(models[1][:4])
    # Independent of the search: the returned images are trained on once more, by torch.optim.SGD.
    pixels = (255 * found.images).round().to(torch.uint8)
    again = ImageSet(pixels, found.labels, split.targets.class_names, "found")
    weights = plan.train(again, range(4), "loop", plan.reference())
    distances = (weights - models[1][:4]).norm(dim=1) / models[1][:4].norm(dim=1)
    # Rounding to 256 values moves the weights by about 0.01; the distances here are 0.05 to 0.5.
    torch.testing.assert_close(distances.double(), found.uncertainty, rtol=0.1, atol=0.02)


@pytest.mark.parametrize(("certain", "n_certified"), [(0.01, 4), (0.07, 19)])
def test_what_has_not_converged_is_not_certified(
    plan: ShadowPlan, split: InformedSplit, models: tuple[Tensor, Tensor], certain: float, n_certified: int
) -> None:
    # five steps are too few for most targets: sorted distances 0.0022 to 0.0083, 0.015 to 0.065, and 0.079
    fitted = fit(AndersonRetraining(steps=5, restarts=0, certain=certain), plan, split, models[0])
    found = fitted.reconstruct(models[1])
    # Independent of the search: the images are trained on once more, by torch.optim.SGD. The distance is relative to
    # the target's effect on the weights, the norm of the released difference.
    again = train_models(plan.known, plan.initial_weights(), found.images, found.labels, "loop")
    remaining = (again.double() - plan.reference() - models[1].double()).norm(dim=1)
    distances = remaining / models[1].double().norm(dim=1)
    assert found.uncertainty is not None
    # measured 2e-4; relative to the norm of the image's own effect, up to 0.04 more
    torch.testing.assert_close(distances, found.uncertainty, rtol=2e-3, atol=1e-5)
    assert found.certified is not None
    assert torch.equal(found.certified, distances <= certain)
    assert int(found.certified.sum()) == n_certified
    errors = (found.images - split.targets.pixels()).square().mean((1, 2, 3))
    assert errors[~found.certified].max() > 5e-4  # measured 1e-3
    if certain == 0.01:
        assert errors[found.certified].max() < 5e-5  # measured 7e-6


def test_chunks_do_not_change_the_result(plan: ShadowPlan, split: InformedSplit, models: tuple[Tensor, Tensor]) -> None:
    whole, chunks = (
        fit(AndersonRetraining(steps=4, restarts=1, together=n), plan, split, models[0]).reconstruct(models[1][:5])
        for n in (5, 2)
    )
    torch.testing.assert_close(whole.images, chunks.images, rtol=0, atol=1e-3)
    torch.testing.assert_close(whole.uncertainty, chunks.uncertainty, rtol=1e-2, atol=1e-4)


class KilledError(Exception):
    """In the place of a signal."""


def test_a_killed_search_goes_on_with_the_same_result(
    plan: ShadowPlan, split: InformedSplit, models: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    attack, shadow = AndersonRetraining(steps=3, restarts=1, together=2), split.shadow
    trained: list[int] = []

    def run(folder: Path | None, kill_at: int | None = None) -> ReconstructedTargets:
        def announce(total: int, label: str, unit: str) -> Callable[[int], None]:
            def advance(n: int) -> None:
                trained.append(n)
                if len(trained) == kill_at:
                    raise KilledError

            return advance

        trained.clear()
        informed = attack.bind(Background(plan, folder, announce))
        return informed.fitted(models[0], shadow.pixels(), shadow.labels, 10).reconstruct(models[1][:6])

    whole = run(None)
    steps = len(trained)
    with pytest.raises(KilledError):
        run(tmp_path, kill_at=steps // 2)
    again = run(tmp_path)
    assert 0 < len(trained) < steps
    assert torch.equal(again.images, whole.images)
    assert torch.equal(again.uncertainty, whole.uncertainty)
    run(tmp_path)
    assert not trained
    file = next(tmp_path.glob("search_*.safetensors"))
    file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(CorruptFileError, match="not the state of a search .* delete it to start over"):
        run(tmp_path)


def test_progress_counts_every_training_to_the_end(
    plan: ShadowPlan, split: InformedSplit, models: tuple[Tensor, Tensor]
) -> None:
    totals: dict[str, list[int]] = {}

    def announce(total: int, label: str, unit: str) -> Callable[[int], None]:
        assert unit == "trainings"
        totals[label] = [total, 0]

        def advance(n: int) -> None:
            totals[label][1] += n

        return advance

    informed = AndersonRetraining(steps=25, restarts=1).bind(Background(plan, announce=announce))
    informed.fitted(models[0], split.shadow.pixels(), split.shadow.labels, 10).reconstruct(models[1])
    assert totals.pop("search 1 of at most 2") == [500, 500]
    assert all(total == done for total, done in totals.values())


@pytest.mark.slow
def test_wrong_labels_are_found_out(plan: ShadowPlan, split: InformedSplit, models: tuple[Tensor, Tensor]) -> None:
    shadow, truth = split.shadow, split.targets.labels[:8]
    misled = AndersonRetraining(steps=20, restarts=2).bind(Background(plan))
    found = misled.fitted(models[0], shadow.pixels(), (shadow.labels + 1) % 10, 10).reconstruct(models[1][:8])
    assert found.certified is not None
    assert (found.labels == truth).float().mean() >= 0.5  # measured 1; all labels of the shadow models are wrong
    assert not found.certified[found.labels != truth].any()


def test_what_it_cannot_repeat_is_refused(plan: ShadowPlan, split: InformedSplit) -> None:
    def changed(**changes: object) -> Background:
        return Background(dataclasses.replace(plan, **changes))  # type: ignore[arg-type]

    for descent in (GradientDescent(dp=PrivateDescent(noise_multiplier=0.0)), GradientDescent(batch_size=5)):
        with pytest.raises(ConfigError, match="AndersonRetraining needs a deterministic training"):
            AndersonRetraining().bind(changed(descent=descent))
    with pytest.raises(UnsupportedModelError, match="got ReleasedCNN"):
        AndersonRetraining().bind(changed(network=ReleasedCNN((1, 10, 10))))
    with pytest.raises(ThreatModelError, match="sees the whole model"):
        AndersonRetraining().bind(Background())
    with pytest.raises(ThreatModelError, match=r"call bind\(Background\(plan\)\) before"):
        AndersonRetraining().fitted(torch.zeros(2, 3), split.shadow.pixels()[:2], split.shadow.labels[:2], 10)
    for wrong in ({"steps": 0}, {"restarts": -1}, {"tolerance": 0.1}, {"certain": 2.0}, {"memory": 0}):
        with pytest.raises(ConfigError, match="0 < tolerance <= certain < 1"):
            AndersonRetraining(**wrong)
