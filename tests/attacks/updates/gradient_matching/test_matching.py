"""The data term: derivatives against finite differences, and all ways of computing it against each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from lit_recon.attacks.updates import BatchNormPrior, GlobalCosine, NormReweightedCosine, Objective, SquaredError
from lit_recon.attacks.updates.gradient_matching.matching import Matching, beside_noise
from lit_recon.defenses import SVTPrivacy
from lit_recon.records import Observation

Observe = Callable[..., Observation]
Batch = tuple[torch.Tensor, torch.Tensor]


def candidates(p: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.rand(p, 2, 3, 8, 8, generator=torch.Generator().manual_seed(5), dtype=dtype)


@pytest.mark.parametrize("kind", ["mlp", "resnet"])
@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("objective", [GlobalCosine(), NormReweightedCosine(), SquaredError()])
def test_truth_has_no_loss_and_no_direction(
    observe: Observe, batch: Batch, kind: str, mode: str, objective: Objective
) -> None:
    images, labels = batch
    matching = Matching([observe(kind, mode)], objective, None)
    at_truth = matching(images[None], labels[None], [0])
    elsewhere = matching(candidates(1), labels[None], [0])
    assert abs(float(at_truth.matching)) < 1e-6
    assert float(at_truth.images.norm()) < 1e-3 * float(elsewhere.images.norm())


@pytest.mark.parametrize("prior", [None, BatchNormPrior(0.1, first_layer=10)])
@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("soft", [False, True])
def test_derivative_against_finite_differences(
    observe: Observe, batch: Batch, prior: BatchNormPrior | None, mode: str, soft: bool
) -> None:
    seen = observe("resnet", mode, "batch", double=True)
    matching = Matching([seen], GlobalCosine(), prior, soft_labels=soft)
    images = candidates(1, torch.float64)
    labels = (
        torch.randn(1, 2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        if soft
        else batch[1][None]
    )
    value = matching(images, labels, [0])

    def total(images: torch.Tensor, labels: torch.Tensor) -> float:
        result = matching(images, labels, [0])
        return float(result.matching + result.batch_norm)

    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        direction = torch.randn(images.shape, generator=generator, dtype=torch.float64)
        eps = 1e-6
        numeric = (total(images + eps * direction, labels) - total(images - eps * direction, labels)) / (2 * eps)
        assert float((value.images * direction).sum()) == pytest.approx(numeric, rel=1e-5, abs=1e-8)
    if soft:
        direction = torch.randn(labels.shape, generator=generator, dtype=torch.float64)
        numeric = (total(images, labels + eps * direction) - total(images, labels - eps * direction)) / (2 * eps)
        assert value.labels is not None
        assert float((value.labels * direction).sum()) == pytest.approx(numeric, rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("prior", [None, BatchNormPrior(0.1)])
@pytest.mark.parametrize("soft", [False, True])
def test_loop_and_vmap_agree(observe: Observe, batch: Batch, prior: BatchNormPrior | None, soft: bool) -> None:
    first = observe("resnet", "train", "batch", double=True)
    seen = [first, first, first]
    labels = torch.randn(3, 2, 5, dtype=torch.float64) if soft else batch[1].expand(3, 2)
    results = [
        Matching(seen, GlobalCosine(), prior, soft, execution)(candidates(3, torch.float64), labels, [0, 1, 2])
        for execution in ("loop", "vmap")
    ]
    for one, other in zip(*results, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def test_different_victims_keep_their_own_updates(observe: Observe, batch: Batch) -> None:
    first = observe("mlp")
    scrambled = {name: value.flip(0) for name, value in first.update.items()}
    other = Observation(**{**vars(first), "update": scrambled})
    labels = batch[1].expand(2, 2)
    together = Matching([first, other], SquaredError(), None, execution="vmap")(candidates(2), labels, [0, 1])
    for i, seen in enumerate((first, other)):
        alone = Matching([seen], SquaredError(), None)(candidates(2)[i : i + 1], labels[:1], [0])
        assert float(together.matching[i]) == pytest.approx(float(alone.matching[0]), rel=1e-5)


def test_auto_decides_once(observe: Observe, batch: Batch) -> None:
    seen = observe("mlp")
    assert Matching([seen], GlobalCosine(), None).execution == "loop"
    matching = Matching([seen, seen], GlobalCosine(), None)
    assert matching.execution == "auto"
    matching(candidates(2), batch[1].expand(2, 2), [0, 1])
    assert matching.execution in ("loop", "vmap")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own, which it turns into failures where they are errors
def test_compiled_form_agrees(observe: Observe, batch: Batch) -> None:
    seen = observe("mlp")
    plain = Matching([seen], GlobalCosine(), None)(candidates(1), batch[1][None], [0])
    compiled = Matching([seen], GlobalCosine(), None, compilation="default")(candidates(1), batch[1][None], [0])
    torch.testing.assert_close(compiled.matching, plain.matching, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(compiled.images, plain.images, rtol=1e-3, atol=1e-6)


def test_the_order_of_a_batch_does_not_matter(observe: Observe, batch: Batch) -> None:
    images, labels = candidates(1), batch[1][None]
    matching = Matching([observe("resnet", "train")], GlobalCosine(), None)
    straight, swapped = matching(images, labels, [0]), matching(images.flip(1), labels.flip(1), [0])
    assert float(swapped.matching) == pytest.approx(float(straight.matching), abs=1e-5)
    torch.testing.assert_close(swapped.images.flip(1), straight.images, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("wrong", [False, True])
def test_noise_is_on_the_entries_that_are_released(observe: Observe, batch: Batch, wrong: bool) -> None:
    """Of an update of which a tenth is released, a root mean square over all entries would be a third of the noise."""
    seen, (images, labels), defense = observe("resnet"), batch, SVTPrivacy(gamma=1e-3, noise_var=20.0)
    update = defense.transform_update(seen.update, None, torch.Generator().manual_seed(0))  # type: ignore[arg-type]  # not read
    told, noise = replace(seen.knowledge, defense=True), defense.released_noise(2)
    assert noise is not None
    if wrong:
        update = {name: torch.where(value != 0, value + 2 * noise.std, 0.0) for name, value in update.items()}
    seen = replace(seen, update=update, defense=defense, knowledge=told)
    assert beside_noise(seen, images, labels, noise.std).endswith("by the noise alone") != wrong
