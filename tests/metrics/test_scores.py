from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lit_recon.errors import ShapeError
from lit_recon.metrics import fidelity
from lit_recon.metrics.perceptual import Lpips, Unavailable
from lit_recon.metrics.scores import score_batch, score_pairs

ABSENT = Unavailable("no weights here")


def batch(n: int, side: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    """Targets, reconstructions that are clearly theirs and in their order, and labels."""
    generator = torch.Generator().manual_seed(n)
    targets = torch.rand(n, 3, side, side, generator=generator)
    images = (targets + 0.1 * torch.randn(targets.shape, generator=generator)).clamp(0, 1)
    return targets, images, torch.randint(0, 10, (n,), generator=generator)


@pytest.mark.parametrize("n", [1, 2, 5, 16])
def test_scores_do_not_depend_on_the_order_of_the_attack(n: int) -> None:
    targets, images, labels = batch(n)
    ordered = score_batch(images, targets, labels, labels, ABSENT)
    assert ordered.permutation.tolist() == list(range(n))
    shuffle = torch.randperm(n, generator=torch.Generator().manual_seed(9))
    shuffled = score_batch(images[shuffle], targets, labels[shuffle], labels, ABSENT)
    assert shuffle[shuffled.permutation].tolist() == list(range(n))
    assert torch.equal(shuffled.reconstructions, images)
    assert shuffled.recovered_labels.tolist() == labels.tolist()
    assert shuffled.label_accuracy == ordered.label_accuracy == 1.0
    for name, values in ordered.per_image.items():
        assert torch.equal(shuffled.per_image[name], values)


def test_scores_follow_the_order_of_the_targets() -> None:
    targets, images, labels = batch(6)
    ordered = score_batch(images, targets, labels, labels, ABSENT)
    shuffle = torch.randperm(6, generator=torch.Generator().manual_seed(1))
    moved = score_batch(images, targets[shuffle], labels, labels[shuffle], ABSENT)
    for name, values in ordered.per_image.items():
        torch.testing.assert_close(moved.per_image[name], values[shuffle])


def test_labels_stay_with_their_images() -> None:
    targets, images, labels = batch(4)
    guessed = torch.tensor([7, 7, 8, 9])
    shuffle = torch.tensor([3, 1, 0, 2])
    scores = score_batch(images[shuffle], targets, guessed[shuffle], labels, ABSENT)
    assert scores.recovered_labels.tolist() == guessed.tolist()


def test_every_score_is_that_of_the_matched_pairs(squeezenet: dict[str, Tensor]) -> None:
    targets, images, labels = batch(3, side=32)
    lpips = Lpips("squeeze", squeezenet)
    scores = score_batch(images.flip(0), targets, labels, labels, lpips)
    functions = {"mse": fidelity.mse, "rmse": fidelity.rmse, "psnr": fidelity.psnr, "ssim": fidelity.ssim}
    for name, function in {**functions, "lpips": lpips}.items():
        torch.testing.assert_close(scores.per_image[name], function(images, targets))
    assert scores.unavailable == {}


def test_an_unavailable_score_is_left_out_and_its_reason_kept() -> None:
    targets, images, labels = batch(2)
    scores = score_batch(images, targets, labels, labels, ABSENT)
    assert list(scores.per_image) == ["mse", "rmse", "psnr", "ssim"]
    assert scores.unavailable == {"lpips": "no weights here"}
    assert list(score_pairs(images, targets, ABSENT)) == list(scores.per_image)


def test_inputs_are_left_as_they_are_and_carry_no_gradient() -> None:
    targets, images, labels = batch(3)
    before = images.clone()
    scores = score_batch(images.requires_grad_(), targets, labels, labels, ABSENT)
    assert torch.equal(images, before)
    assert not any(values.requires_grad for values in [scores.reconstructions, *scores.per_image.values()])


@pytest.mark.parametrize(
    ("n_images", "n_recovered", "n_labels", "complaint"),
    [
        (2, 3, 3, "pair up"),
        (3, 2, 3, "2 recovered and 3 true"),
        (3, 2, 2, "2 labels for 3 targets"),
        (0, 0, 0, "at least one label"),
    ],
)
def test_batches_that_disagree_are_refused(n_images: int, n_recovered: int, n_labels: int, complaint: str) -> None:
    targets, images, labels = batch(3)
    with pytest.raises(ShapeError, match=complaint):
        score_batch(images[:n_images], targets, labels[:n_recovered], labels[:n_labels], ABSENT)
