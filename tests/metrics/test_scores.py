from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lit_recon.errors import ShapeError
from lit_recon.metrics import Lpips, Measure, Metric, PerceptualDistance, fidelity, metrics_of
from lit_recon.metrics.scores import score_batch, score_pairs

METRICS = metrics_of(["mse", "rmse", "psnr", "ssim", "label_accuracy"])


def batch(n: int, side: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    """Targets, reconstructions that are clearly theirs and in their order, and labels."""
    generator = torch.Generator().manual_seed(n)
    targets = torch.rand(n, 3, side, side, generator=generator)
    images = (targets + 0.1 * torch.randn(targets.shape, generator=generator)).clamp(0, 1)
    return targets, images, torch.randint(0, 10, (n,), generator=generator)


@pytest.mark.parametrize("n", [1, 2, 5, 16])
def test_scores_do_not_depend_on_the_order_of_the_attack(n: int) -> None:
    targets, images, labels = batch(n)
    ordered = score_batch(images, targets, labels, labels, METRICS)
    assert torch.equal(ordered.reconstructions, images)
    shuffle = torch.randperm(n, generator=torch.Generator().manual_seed(9))
    shuffled = score_batch(images[shuffle], targets, labels[shuffle], labels, METRICS)
    assert torch.equal(shuffled.reconstructions, images)
    assert shuffled.recovered_labels.tolist() == labels.tolist()
    assert shuffled.of_labels["label_accuracy"].tolist() == ordered.of_labels["label_accuracy"].tolist() == [1.0] * n
    for name, values in ordered.per_image.items():
        torch.testing.assert_close(shuffled.per_image[name], values)


def test_scores_follow_the_order_of_the_targets() -> None:
    targets, images, labels = batch(6)
    ordered = score_batch(images, targets, labels, labels, METRICS)
    shuffle = torch.randperm(6, generator=torch.Generator().manual_seed(1))
    moved = score_batch(images, targets[shuffle], labels, labels[shuffle], METRICS)
    for name, values in ordered.per_image.items():
        torch.testing.assert_close(moved.per_image[name], values[shuffle])


def test_labels_stay_with_their_images() -> None:
    targets, images, labels = batch(4)
    guessed = torch.tensor([7, 7, 8, 9])
    shuffle = torch.tensor([3, 1, 0, 2])
    scores = score_batch(images[shuffle], targets, guessed[shuffle], labels, METRICS)
    assert scores.recovered_labels.tolist() == guessed.tolist()


def test_every_score_is_that_of_the_matched_pairs(squeezenet: dict[str, Tensor], tmp_path: Path) -> None:
    targets, images, labels = batch(3, side=32)
    save_file(squeezenet, tmp_path / "squeezenet.safetensors")
    lpips = PerceptualDistance("squeeze", tmp_path / "squeezenet.safetensors")
    scores = score_batch(images.flip(0), targets, labels, labels, metrics_of(configured=[lpips]))
    functions = {"mse": fidelity.mse, "rmse": fidelity.rmse, "psnr": fidelity.psnr, "ssim": fidelity.ssim}
    assert list(scores.per_image) == [*functions, "lpips"]
    for name, function in {**functions, "lpips": Lpips("squeeze", squeezenet)}.items():
        torch.testing.assert_close(scores.per_image[name], function(images, targets))


def test_pairs_have_the_metrics_of_images_alone() -> None:
    targets, images, _ = batch(2)
    assert list(score_pairs(images, targets, METRICS)) == ["mse", "rmse", "psnr", "ssim"]


@pytest.mark.parametrize(
    ("values", "complaint"),
    [(torch.ones(2, 2), "got shape \\(2, 2\\)"), (torch.tensor([0.5, torch.nan]), "some of it NaN")],
)
def test_a_metric_that_gives_no_number_per_image_is_refused_by_name(values: Tensor, complaint: str) -> None:
    class Odd(Metric):
        measure = Measure("odd", "Odd")

        def __call__(self, found: Tensor, truth: Tensor) -> Tensor:
            return values

    targets, images, _ = batch(2)
    with pytest.raises(ShapeError, match=f"the metric 'odd' must return one number per image.*{complaint}"):
        score_pairs(images, targets, [Odd()])


def test_inputs_are_left_as_they_are_and_carry_no_gradient() -> None:
    targets, images, labels = batch(3)
    before = images.clone()
    scores = score_batch(images.requires_grad_(), targets, labels, labels, METRICS)
    assert torch.equal(images, before)
    assert not any(values.requires_grad for values in [scores.reconstructions, *scores.per_image.values()])


@pytest.mark.parametrize(
    ("n_images", "n_recovered", "n_labels", "complaint"),
    [
        (2, 3, 3, "pair up"),
        (3, 2, 3, "3 images, 3 true and 2 recovered labels"),
        (3, 2, 2, "3 images, 2 true and 2 recovered labels"),
    ],
)
def test_batches_that_disagree_are_refused(n_images: int, n_recovered: int, n_labels: int, complaint: str) -> None:
    targets, images, labels = batch(3)
    with pytest.raises(ShapeError, match=complaint):
        score_batch(images[:n_images], targets, labels[:n_recovered], labels[:n_labels], METRICS)
