"""A scored attack on released models: reconstructions, their scores beside the oracle's, and the files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lit_recon.attacks.released.base import ReconstructedTargets
from lit_recon.attacks.shadow import ShadowPlan, ShadowStore
from lit_recon.data import ImageSet
from lit_recon.data.informed_splits import InformedSplit
from lit_recon.errors import MissingDataError, ShapeError
from lit_recon.experiments.released_attack.page import write_page
from lit_recon.experiments.released_attack.settings import ReconnSettings, ShadowSettings
from lit_recon.measures import MEASURES, Measure
from lit_recon.metrics import (
    MeanImage,
    NearestPublic,
    PerceptualDistance,
    PredictionDivergence,
    Unavailable,
    metrics_of,
    mse,
)
from lit_recon.metrics.baselines import NearestNeighborOracle
from lit_recon.metrics.scores import certified_entries, scores_with_baselines
from lit_recon.models import Backbone, load_backbone
from lit_recon.reporting.run_folder import RunFolder
from lit_recon.reporting.wording import format_score, percent
from lit_recon.reporting.writing import Scalar, with_deviations, write_metrics, write_scores, write_tensors


def classifier_of(checkpoint: Path | None, images: ImageSet) -> Backbone | Unavailable:
    """The classifier in a file of `train.py backbone`, used for scoring only, or the reason why there is none.

    Raises as `load_backbone` does, and a ShapeError if it is for other images or classes.
    """
    if checkpoint is None:
        return Unavailable("no classifier was given: train one by train.py backbone and give its file by classifier")
    model = load_backbone(checkpoint).model
    if model.image_shape != images.image_shape or model.n_classes != images.n_classes:
        raise ShapeError(
            f"classifier {checkpoint} takes images {model.image_shape} of {model.n_classes} classes; {images.name} has "
            f"{images.image_shape} of {images.n_classes}: give one that was trained on such data"
        )
    return model


def released_store(plan: ShadowPlan, folder: RunFolder) -> ShadowStore:
    """The released models of a finished run with these shadow models; a MissingDataError where they are gone."""
    there = folder.checkpoints / "released"
    store = ShadowStore.open(there, plan.for_purpose("released").description)
    if store is None:
        raise MissingDataError(f"{there} is not there: repeat the cell by deleting {folder.path}")
    return store


def model_facts(
    settings: ReconnSettings, shadows: ShadowSettings, split: InformedSplit, plan: ShadowPlan, public: ImageSet
) -> dict[str, Scalar]:
    """Entries of a run's record about its models, and what an adversary who holds the `public` images sees of them."""
    seen = settings.access.describe(plan.network, public)
    facts: dict[str, Scalar] = {**shadows.facts(split), "seen": seen.shown, **shadows.privacy()}
    if seen.hidden:
        facts["hidden"] = seen.hidden
    if shadows.descent.snapshots:
        facts["released_steps"] = ", ".join(map(str, plan.known.kept_steps))
    return facts


@dataclass(frozen=True)
class ReconnOutcome:
    """A scored attack on released models; its `metrics` and `notes` are for the run's record."""

    found: ReconstructedTargets
    nearest: Tensor  # for every target, the nearest image that the adversary holds, `(m, c, h, w)`
    per_image: Mapping[str, Iterable[float | None]]  # `(m,)` by metric, all None where one is not available
    metrics: dict[str, Scalar]
    measures: list[Measure]
    notes: list[str]


def score_targets(
    settings: ReconnSettings, split: InformedSplit, differences: Tensor, observed: Tensor, held: Tensor | None = None
) -> ReconnOutcome:
    """Attack, then compare with the truth, with the mean image, and with the nearest other images.

    The adversary learns from `differences` `(s, p)` of the shadow models, and observes those `(m, p)` of released ones.
    Images that it holds are `held`, by default the fixed set and the shadow targets.
    """
    shadow, targets = split.shadow.pixels(), split.targets.pixels()
    labels, n_classes = split.shadow.labels, split.fixed.n_classes
    curve: dict[str, Scalar] = {}
    for k in settings.curve:
        fewer = settings.reconstructor.fitted(differences[:k], shadow[:k], labels[:k], n_classes)
        curve[f"mse_at_{k}_shadows"] = float(mse(fewer.reconstruct(observed).images, targets).mean())
    fitted = settings.reconstructor.fitted(differences, shadow, labels, n_classes)
    found = fitted.reconstruct(observed)
    lpips = PerceptualDistance(settings.lpips.network, settings.lpips.weights, settings.lpips.download)
    classifier = PredictionDivergence(classifier_of(settings.classifier, split.targets))
    asked = metrics_of(["mse", "rmse", "psnr", "ssim", lpips, classifier])
    reasons = {metric.measure.key: metric.unavailable() for metric in asked}
    available = [metric for metric in asked if not reasons[metric.measure.key]]
    pool = [part.images for part in (split.fixed, split.shadow, *split.others)]
    held = torch.cat(pool[:2]) if held is None else held
    mean, nearest = MeanImage.from_images(held).query(targets), NearestPublic(held).query(targets)[1]
    scores = scores_with_baselines(found.images, mean, nearest, targets, available)
    oracle = NearestNeighborOracle.measure(targets, torch.cat(pool))
    metrics: dict[str, Scalar] = {"n": len(targets), "n_batches": len(targets)}
    metrics |= with_deviations({**scores, "oracle_mse": oracle.nearest})
    for name, reason in reasons.items():
        if reason:
            metrics |= {name: None, f"{name}_reason": reason}
    metrics |= {f"oracle_mse_percentile_{percent}": value for percent, value in oracle.percentiles.items()}
    success = (scores["mse"] < oracle.nearest).double()
    held_too = (scores["mse"] < scores["baseline_nearest_public_mse"]).double()
    metrics |= {"success_rate": float(success.mean()), "success_rate_held": float(held_too.mean())}
    if found.certified is not None:
        metrics |= certified_entries(found.certified, scores["mse"], "mse")
    metrics["label_accuracy"] = float((found.labels == split.targets.labels).double().mean())
    metrics |= {**curve, **fitted.facts}
    per_image = {
        **{name: scores.get(name, [None] * len(targets)) for name in reasons},
        "mean_image_rmse": scores["baseline_mean_image_rmse"],
        "nearest_public_rmse": scores["baseline_nearest_public_rmse"],
        "oracle_mse": oracle.nearest,
        "success": success,
    }
    measures = [metric.measure for metric in asked] + [MEASURES["label_accuracy"]]
    notes = [*_notes(metrics, curve, split), *fitted.notes]
    return ReconnOutcome(found, nearest, per_image, metrics, measures, notes)


def write_targets(
    folder: RunFolder,
    found: ReconstructedTargets,
    targets: ImageSet,
    nearest: Tensor,
    per_image: Mapping[str, Iterable[float | None]],
) -> None:
    """Write the images of a run, and its scores by target image."""
    write_tensors(
        folder,
        reconstructions=found.images,
        targets=targets.pixels(),
        nearest_public=nearest,
        labels=targets.labels,
        recovered_labels=found.labels,
        class_names=targets.class_names,
    )
    certified = None if found.certified is None else found.certified.tolist()
    write_scores(folder, targets.labels, found.labels, found.uncertainty, per_image, certified)


def write_reconn(folder: RunFolder, split: InformedSplit, outcome: ReconnOutcome, facts: Mapping[str, Scalar]) -> None:
    """Write all files of the run: the metrics, which mark it as complete, and last the page."""
    write_targets(folder, outcome.found, split.targets, outcome.nearest, outcome.per_image)
    write_metrics(folder, {**outcome.metrics, "notes": outcome.notes, **facts}, outcome.measures)
    write_page(folder.path)


def _notes(metrics: Mapping[str, Scalar], curve: Mapping[str, Scalar], split: InformedSplit) -> list[str]:
    """Remarks for readers of the page."""
    pool = sum(map(len, (split.fixed, split.shadow, *split.others)))
    one, ten, half = (shown_mse(metrics[f"oracle_mse_percentile_{share}"]) for share in (1, 10, 50))
    against_oracle = (
        f"An oracle that knows the target image and picks the nearest of all {pool} other images has an MSE of "
        f"{shown_mse(metrics['oracle_mse'])}. This attack has an MSE of {shown_mse(metrics['mse'])}; its success rate, "
        f"the share of target images for which it is nearer than the oracle, is {_share(metrics['success_rate'])}. For "
        f"{_share(metrics['success_rate_held'])} it is nearer than the nearest image that the adversary holds."
    )
    spread = (
        f"Of all other images, 1 % are within an MSE of {one} of a target image, 10 % within {ten}, half within {half}."
    )
    notes = [against_oracle, spread]
    if curve:
        fewer = ", ".join(f"{shown_mse(value)} with {name.split('_')[2]}" for name, value in curve.items())
        notes.append(f"MSE with fewer shadow models: {fewer}.")
    if metrics.get("certified_mse") is not None:
        notes.append(
            f"{_share(metrics['certified_rate'], 1)} of the reconstructions are certified: they passed the attack's "
            f"own test. Their mean MSE is {shown_mse(metrics['certified_mse'])}, the largest "
            f"{shown_mse(metrics['certified_mse_max'])}."
        )
    return notes


def shown_mse(value: Scalar) -> str:
    """A mean squared error in words."""
    return format_score("mse", value if isinstance(value, float) else None)


def _share(value: Scalar, decimals: int = 0) -> str:
    return percent(value if isinstance(value, float) else None, decimals)
