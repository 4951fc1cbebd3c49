"""Scores of finished victims: every image beside its baselines, and the means over a whole run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lit_recon.attacks.updates import FeatureMap
from lit_recon.clients import Client
from lit_recon.data import VictimBatch
from lit_recon.measures import Measure
from lit_recon.metrics import (
    BatchScores,
    ImageScore,
    MeanImage,
    Metric,
    NearestPublic,
    checked_values,
    score_batch,
    score_pairs,
)
from lit_recon.modules.attack_state import FinishedBatch
from lit_recon.records import Observation, Reconstruction
from lit_recon.reporting.writing import Scalar

_BASELINES = ("mean_image", "nearest_public")
#: Entries that the record leaves out of baselines, and of labels, which are recovered by the batch.
_SPREADS = ("_std", "_low", "_high")


@dataclass(frozen=True)
class ScoredBatch:
    """One client's batch, its reconstruction and all scores; everything lies on the CPU, in the order of the targets.

    Nearest public images are `(n, c, h, w)`, or None where there are no public images; scores of baselines are `(n,)`
    by baseline (`mean_image`, `nearest_public`) and metric, or empty.
    """

    batch: VictimBatch
    finished: FinishedBatch
    scores: BatchScores
    nearest_public: Tensor | None
    baselines: dict[str, dict[str, Tensor]]

    @property
    def certified(self) -> list[bool | None]:
        """Whether the attack knows that a reconstruction is the true image; None where it gives no certificate."""
        found = self.finished.reconstruction.certified
        return [None] * len(self.batch.labels) if found is None else found[self.scores.order].tolist()

    @property
    def per_image(self) -> dict[str, Tensor]:
        """Scores `(n,)` of the reconstruction and of recovered features, by the key of the metric."""
        features = {key: torch.tensor(v, dtype=torch.float64) for key, v in self.finished.feature_scores.items()}
        return {**self.scores.per_image, **features}


def feature_scores(
    metrics: Sequence[Metric], seen: Observation, found: Reconstruction, images: Tensor, client: Client
) -> dict[str, list[float]]:
    """Metrics of recovered features beside those of the true images; empty where the attack recovered none.

    Empty, too, where features of a true image lie exactly at the center: they have no direction to compare with.
    """
    chosen = [metric for metric in metrics if metric.of == "features"]
    if found.features is None or not chosen:
        return {}
    # of the client's own model: an attacker may see it without BatchNorm statistics
    own = replace(seen, model=client.model, buffers=dict(client.model.named_buffers()))
    with torch.no_grad():
        truth = FeatureMap(own, client.batch_norm)(images)
    if not truth.any(dim=1).all():
        return {}
    return {m.measure.key: checked_values(m, found.features, truth, len(images)).tolist() for m in chosen}


def score_batches(
    finished: Sequence[FinishedBatch], batches: Sequence[VictimBatch], public: Tensor | None, metrics: Sequence[Metric]
) -> list[ScoredBatch]:
    """Score finished batches against the truth, `batches` in the same order, by metrics that are available here.

    The baselines know the images `public` `(N, c, h, w)`, bytes or floats in [0, 1]; None: no baselines.
    """
    if not batches:
        return []
    sizes = [len(batch.images) for batch in batches]
    nearest: Sequence[Tensor | None] = [None] * len(batches)
    baselines: dict[str, dict[str, Sequence[Tensor]]] = {}
    if public is not None:
        targets = torch.cat([batch.images.cpu() for batch in batches])
        _, closest = NearestPublic(public).query(targets)
        nearest = closest.split(sizes)
        means = MeanImage.from_images(public).query(targets)
        for name, guess in zip(_BASELINES, (means, closest), strict=True):
            scored_guess = score_pairs(guess, targets, metrics)
            baselines[name] = {key: values.split(sizes) for key, values in scored_guess.items()}
    scored = []
    for i, (batch, done) in enumerate(zip(batches, finished, strict=True)):
        found = done.reconstruction
        scores = score_batch(found.images, batch.images, found.labels, batch.labels, metrics)
        guesses = {name: {key: values[i] for key, values in parts.items()} for name, parts in baselines.items()}
        scored.append(ScoredBatch(batch, done, scores, nearest[i], guesses))
    return scored


class RunScores(nn.Module):
    """Means and spreads over all victims of a run, whichever process attacked them.

    Of the requested metrics, `metrics` are available here, which may take a download; `unavailable` says by key why
    the others are not. `baselines`: whether there are public images to compare with.
    """

    def __init__(self, metrics: Sequence[Metric], baselines: bool = True) -> None:
        super().__init__()
        reasons = {metric.measure.key: metric.unavailable() for metric in metrics}
        self.asked = [metric.measure for metric in metrics]
        self.unavailable = {key: reason for key, reason in reasons.items() if reason}
        self.metrics = [metric for metric in metrics if metric.measure.key not in self.unavailable]
        self._ours = {metric.measure.key: ImageScore(metric.measure.key) for metric in self.metrics}
        self._baselines = {
            (base, metric.measure.key): ImageScore(f"baseline_{base}_{metric.measure.key}")
            for base in _BASELINES
            for metric in self.metrics
            if baselines and metric.of == "images"
        }
        # registered, so that they follow the module to its device
        self._all = nn.ModuleList([*self._ours.values(), *self._baselines.values()])

    def rehearse(self, images: Tensor) -> None:
        """Compare images `(n, c, h, w)` with themselves, so that an inapplicable metric is refused early.

        Raises:
            ShapeError: a metric does not take such images, or does not return one number per image.
        """
        score_pairs(images.cpu(), images.cpu(), self.metrics)

    def update(self, scored: Iterable[ScoredBatch]) -> None:
        for part in scored:
            values = part.per_image | part.scores.of_labels
            for key, score in self._ours.items():
                score.update(values.get(key, torch.zeros(0)))  # features may be missing
            for (base, key), baseline in self._baselines.items():
                baseline.update(part.baselines[base][key])

    def record(self) -> dict[str, Scalar]:
        """Entries of `metrics.json`, those of recovered features if there are any; to be called by every process."""
        entries: dict[str, Scalar] = {}
        n = int(self._ours["rmse"].compute()["n"])
        for metric in self.metrics:
            key, score = metric.measure.key, self._ours[metric.measure.key]
            known = int(score.compute()["n"])
            if metric.of != "features" or known == n:
                kept = score.record().items()
                entries |= {name: v for name, v in kept if metric.of != "labels" or not name.endswith(_SPREADS)}
            elif known:
                entries |= {key: None, f"{key}_reason": f"known for {known} of {n} images only"}
        for key, reason in self.unavailable.items():
            entries |= {key: None, f"{key}_reason": reason}
        for score in self._baselines.values():
            entries |= {key: value for key, value in score.record().items() if not key.endswith(_SPREADS)}
        return entries

    def measures(self, record: dict[str, Scalar]) -> list[Measure]:
        """How to print the metrics that a record of `record` holds, in the order asked for."""
        return [measure for measure in self.asked if measure.key in record]
