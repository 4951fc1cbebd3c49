"""From finished victims to figures: every image scored beside its baselines, and the means over a whole run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lit_recon.data import ImageSet, VictimBatch
from lit_recon.metrics import (
    BatchScores,
    ImageScore,
    LabelAccuracy,
    Lpips,
    MeanImage,
    NearestPublic,
    Unavailable,
    score_batch,
    score_pairs,
)
from lit_recon.modules.attack_state import FinishedBatch
from lit_recon.reporting.writing import Scalar

#: How well features were recovered: their part outside the recovered span, and |cos| with the recovered one.
FEATURE_SCORES = ("feature_error", "feature_cosine")
#: Scores of a baseline that the record holds beside ours, and what it leaves out of them.
_BASELINES = ("mean_image", "nearest_public")
_SPREADS = ("_std", "_low", "_high")


@dataclass(frozen=True)
class ScoredBatch:
    """One client's batch, its reconstruction and all figures; everything lies on the CPU, in the order of the targets.

    Attributes:
        batch: the truth.
        finished: what the attack returned.
        scores: of the reconstruction.
        nearest_public: images `(n, c, h, w)`.
        baselines: scores `(n,)` of the mean image and of the nearest public image, by baseline and score.
    """

    batch: VictimBatch
    finished: FinishedBatch
    scores: BatchScores
    nearest_public: Tensor
    baselines: dict[str, dict[str, Tensor]]


def score_batches(
    finished: Sequence[FinishedBatch], batches: Sequence[VictimBatch], public: ImageSet, lpips: Lpips | Unavailable
) -> list[ScoredBatch]:
    """Score finished batches against the truth.

    Args:
        finished: one per batch.
        batches: the truth, in the same order.
        public: images that the baselines know; searched once for all batches.
        lpips: the perceptual score, or why it cannot be had.
    """
    if not batches:
        return []
    targets = torch.cat([batch.images.cpu() for batch in batches])
    _, nearest = NearestPublic(public.images).query(targets)
    guesses = {"mean_image": MeanImage.from_images(public.images).query(targets), "nearest_public": nearest}
    sizes = [len(batch.images) for batch in batches]
    baselines = {name: score_pairs(guess, targets, lpips) for name, guess in guesses.items()}
    parts = {
        name: {score: values.split(sizes) for score, values in scores.items()} for name, scores in baselines.items()
    }
    return [
        ScoredBatch(
            batch,
            done,
            score_batch(done.reconstruction.images, batch.images, done.reconstruction.labels, batch.labels, lpips),
            images,
            {name: {score: values[i] for score, values in scores.items()} for name, scores in parts.items()},
        )
        for i, (batch, done, images) in enumerate(zip(batches, finished, nearest.split(sizes), strict=True))
    ]


class RunScores(nn.Module):
    """Means and spreads over all victims of a run, whichever process attacked them.

    Args:
        lpips: whether LPIPS can be had.
        features: whether the attack recovers features.
    """

    def __init__(self, lpips: Lpips | Unavailable, features: bool = False) -> None:
        super().__init__()
        self.unavailable = lpips.reason if isinstance(lpips, Unavailable) else None
        names = ["mse", "rmse", "psnr", "ssim", *([] if self.unavailable else ["lpips"])]
        self._ours = {name: ImageScore(name) for name in names}
        self._baselines = {(base, name): ImageScore(f"baseline_{base}_{name}") for base in _BASELINES for name in names}
        self._features = {name: ImageScore(name) for name in FEATURE_SCORES if features}
        self._labels = LabelAccuracy()
        # registered, so that they follow the module to its device
        self._all = nn.ModuleList([*self._ours.values(), *self._baselines.values(), *self._features.values()])

    def update(self, scored: Iterable[ScoredBatch]) -> None:
        """Add batches."""
        for part in scored:
            for name, score in self._ours.items():
                score.update(part.scores.per_image[name])
            for (base, name), score in self._baselines.items():
                score.update(part.baselines[base][name])
            for name, score in self._features.items():
                score.update(torch.tensor(part.finished.feature_scores[name], dtype=torch.float64))
            self._labels.update(part.finished.reconstruction.labels.cpu(), part.batch.labels.cpu())

    def record(self) -> dict[str, Scalar]:
        """Entries of `metrics.json`; every process has to call this, since it synchronises."""
        entries: dict[str, Scalar] = {}
        for score in (*self._ours.values(), *self._features.values()):
            entries |= score.record()
        if self.unavailable:
            entries |= {"lpips": None, "lpips_reason": self.unavailable}
        entries["label_accuracy"] = float(self._labels.compute())
        for score in self._baselines.values():
            entries |= {key: value for key, value in score.record().items() if not key.endswith(_SPREADS)}
        return entries
