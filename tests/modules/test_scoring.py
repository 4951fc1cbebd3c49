"""Scores beside their baselines, batch by batch and over a run, against plain NumPy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from lit_recon.clients import Client
from lit_recon.data import ImageSet, VictimBatch
from lit_recon.errors import ShapeError
from lit_recon.metrics import PerceptualDistance, metrics_of
from lit_recon.models import MLP, Backbone, ConvNet, WideFeatureLayer
from lit_recon.modules.attack_state import FinishedBatch
from lit_recon.modules.scoring import RunScores, feature_scores, score_batches
from lit_recon.records import Knowledge, Normalization, Reconstruction

METRICS = metrics_of(configured=[PerceptualDistance("none")])


@pytest.fixture
def public() -> ImageSet:
    images = torch.randint(256, (20, 1, 12, 12), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return ImageSet(images, torch.arange(20) % 2, ["a", "b"], "public")


def pairs() -> tuple[list[FinishedBatch], list[VictimBatch]]:
    """Three batches of two, reconstructed with noise and in the wrong order."""
    finished, batches = [], []
    for index in range(3):
        generator = torch.Generator().manual_seed(index + 1)
        images = torch.rand(2, 1, 12, 12, generator=generator)
        labels = torch.tensor([0, index % 2])
        noisy = (images + 0.05 * torch.randn(images.shape, generator=generator)).clamp(0, 1)
        found = Reconstruction(noisy.flip(0), torch.tensor([0, 1]), 0.1)
        finished.append(FinishedBatch(index, found, [], 1.0, 1.0, 1))
        batches.append(VictimBatch(index, images, labels, torch.tensor([index, index + 10])))
    return finished, batches


def rmse(images: torch.Tensor, targets: torch.Tensor) -> np.ndarray:
    difference = (images.double() - targets.double()).numpy().reshape(len(images), -1)
    return np.sqrt((difference**2).mean(1))


def test_scores_and_baselines_of_every_image(public: ImageSet) -> None:
    finished, batches = pairs()
    scored = score_batches(finished, batches, public.images, RunScores(METRICS).metrics)
    shades = public.images.double() / 255
    for part, done, batch in zip(scored, finished, batches, strict=True):
        matched = done.reconstruction.images.flip(0)
        assert torch.equal(part.scores.reconstructions, matched)
        np.testing.assert_allclose(part.scores.per_image["rmse"], rmse(matched, batch.images))
        mean = shades.mean(0, keepdim=True).expand(2, -1, -1, -1)
        np.testing.assert_allclose(part.baselines["mean_image"]["rmse"], rmse(mean, batch.images), rtol=1e-6)
        distances = np.stack([rmse(shades[i : i + 1].expand(2, -1, -1, -1), batch.images) for i in range(20)])
        np.testing.assert_allclose(part.baselines["nearest_public"]["rmse"], distances.min(0), rtol=1e-6)
        assert torch.allclose(part.nearest_public, shades[distances.argmin(0)].float())


def test_the_record_of_a_run(public: ImageSet) -> None:
    finished, batches = pairs()
    scores = RunScores(METRICS)
    scored = score_batches(finished, batches, public.images, scores.metrics)
    scores.update(scored[:1])
    scores.update(scored[1:])
    record = scores.record()
    values = np.concatenate([part.scores.per_image["rmse"].numpy() for part in scored])
    assert record["rmse"] == pytest.approx(values.mean())
    assert record["rmse_std"] == pytest.approx(values.std(ddof=1))
    assert (record["lpips"], record["lpips_reason"]) == (None, "switched off by lpips.network")
    assert record["label_accuracy"] == pytest.approx(4 / 6)
    nearest = np.concatenate([part.baselines["nearest_public"]["psnr"].numpy() for part in scored])
    assert record["baseline_nearest_public_psnr"] == pytest.approx(nearest.mean())
    assert not [key for key in record if key.startswith("baseline") and key.endswith("_std")]


def test_features_count_only_where_every_batch_has_them(public: ImageSet) -> None:
    finished, batches = pairs()
    known = [replace(done, feature_scores={"feature_error": [0.25, 0.75]}) for done in finished]
    for found, entries in (
        (known, {"feature_error": 0.5}),
        (known[:2] + finished[2:], {"feature_error": None, "feature_error_reason": "known for 4 of 6 images only"}),
        (finished, {}),
    ):
        scores = RunScores(METRICS)
        scores.update(score_batches(found, batches, public.images, scores.metrics))
        record = scores.record()
        assert {key: record[key] for key in record if key in ("feature_error", "feature_error_reason")} == entries
        assert "feature_cosine" not in record
        measures = [measure.key for measure in scores.measures(record)]
        assert ("feature_error" in measures) == bool(entries)


@torch.no_grad()
def test_features_at_the_center_have_no_scores() -> None:
    trunk = MLP((1, 4, 4), [8])
    for name, value in trunk.named_parameters():
        value.fill_(0.0 if name.endswith("bias") else 0.1)
    model = Backbone(trunk, 2, Normalization((0.0,), (1.0,)), WideFeatureLayer(8, 16, 0))
    images = torch.rand(2, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    images[1] = 0  # features of 0, where the center is
    client = Client(model)
    seen = client.observe(images, torch.tensor([0, 1]))
    found = Reconstruction(images, torch.tensor([0, 1]), 0.1, features=torch.eye(2, 8))
    assert feature_scores(METRICS, seen, found, images, client) == {}
    assert feature_scores(METRICS, seen, found, images[[0, 0]], client).keys() == {"feature_error", "feature_cosine"}


@torch.no_grad()
def test_true_features_are_those_of_the_client_who_has_running_statistics() -> None:
    torch.manual_seed(0)
    images = torch.rand(2, 1, 8, 8)
    trunk = ConvNet((1, 8, 8), widths=[4, 8])
    model = Backbone(trunk, 2, Normalization((0.5,), (0.3,)), WideFeatureLayer(trunk.out_features, 16, 0)).eval()
    for name, value in model.named_buffers():
        if name.endswith("running_mean"):
            value.uniform_(-1, 0)
    client = Client(model)
    seen = client.observe(images, torch.tensor([0, 1]), Knowledge(batch_norm="none"))
    truth = model.feature_layer.directions(model.features(images))
    found = Reconstruction(images, torch.tensor([0, 1]), 0.1, features=truth)
    assert feature_scores(METRICS, seen, found, images, client)["feature_cosine"] == pytest.approx([1, 1], abs=1e-6)


def test_a_metric_that_images_are_not_fit_for_is_refused_early() -> None:
    with pytest.raises(ShapeError, match="ssim needs images of at least 3 x 3 pixels"):
        RunScores(METRICS).rehearse(torch.zeros(1, 1, 2, 2))


def test_no_victims_no_scores(public: ImageSet) -> None:
    assert score_batches([], [], public.images, METRICS) == []
