"""Scores of attacks on generalized linear models: true and estimated errors, and the files of the run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from lit_recon.attacks.glm.family import Array, GLMReconstruction
from lit_recon.attacks.glm.released import ReleasedWithoutIntercept
from lit_recon.attacks.glm.training import Attempt, FittedRegression, Regression
from lit_recon.data.informed_splits import InformedSplit
from lit_recon.experiments.glm.page import BESIDE, write_page
from lit_recon.experiments.glm.settings import GlmSettings
from lit_recon.io.files import write_bytes
from lit_recon.measures import MEASURES
from lit_recon.metrics import NearestPublic, metrics_of
from lit_recon.metrics.scores import scores_with_baselines
from lit_recon.reporting.run_folder import RunFolder
from lit_recon.reporting.writing import Scalar, with_deviations, write_metrics, write_scores, write_tensors

#: Errors of pixels below this count as exact: a level of gray is 4e-3.
EXACT = 1e-6
#: Metrics of a reconstructed record, and the attributes that hold them.
_OF_RECORD = {"error_estimate": "error", "condition": "condition", "residual": "residual", "target_gap": "target_gap"}
#: Notes that share this number of first characters count as the same.
_BEGINNING = 40
_METRICS = metrics_of(["mse", "rmse", "psnr", "ssim"])
_MEASURES = [MEASURES[key] for key in ("mse", "rmse", "psnr", "ssim", "lpips", "label_accuracy")]
_NO_LPIPS = "not measured here: closed forms are judged by their errors"


@dataclass(frozen=True)
class AttackedModel:
    """A model, and one attack for each target."""

    regression: Regression
    fitted: FittedRegression
    attempts: list[Attempt]
    truth: Array  # pixels of the targets `(m, d)`
    targets: Array  # their values `(m,)`
    means: Array  # of all other records, for each target `(m, d)`: the guess where the attack is impossible
    held_out_score: float  # accuracy on held-out records, or the share of variance or deviance explained

    @property
    def images(self) -> Array:
        """The reconstructed images, `(m, d)` in [0, 1]."""
        pairs = zip(self.attempts, self.means, strict=True)
        return np.stack([attempt.image(mean, (0.0, 1.0)) for attempt, mean in pairs])

    @property
    def errors(self) -> Array:
        """Largest error of a pixel, before clipping, `(m,)`; NaN where the attack is impossible."""
        pairs = zip(self.attempts, self.truth, strict=True)
        return np.array([_largest_error(attempt.found, true) for attempt, true in pairs])

    @property
    def needs_targets(self) -> bool:
        """Whether the attack was given the targets, which it then does not recover."""
        return isinstance(self.fitted.released, ReleasedWithoutIntercept)

    @property
    def recovered(self) -> list[int]:
        """Recovered targets rounded to integers; -1 where there is none, none of reasonable size, or it was given."""
        if self.needs_targets:
            return [-1] * len(self.attempts)
        values = [math.nan if attempt.found is None else attempt.found.target for attempt in self.attempts]
        return [round(value) if math.isfinite(value) and abs(value) < 1e6 else -1 for value in values]

    def columns(self) -> dict[str, list[float | None]]:
        """Metrics by name, one value per target; None where the attack is impossible or gives no value."""
        found = [attempt.found for attempt in self.attempts]
        return {
            "max_error": [None if math.isnan(error) else float(error) for error in self.errors],
            **{key: [getattr(one, name, None) for one in found] for key, name in _OF_RECORD.items()},
            "refused": [float(one is None) for one in found],
        }

    def metrics(self) -> dict[str, Scalar]:
        """Metrics over all targets."""
        columns, errors = self.columns(), self.errors
        there = errors[~np.isnan(errors)]
        both = zip(columns["max_error"], columns["error_estimate"], strict=True)
        pairs = [(error, estimate) for error, estimate in both if error is not None and estimate is not None]
        return {
            "regression": repr(self.regression),
            "refused": sum(attempt.found is None for attempt in self.attempts),
            "max_error_median": _over(np.median, there),
            "max_error_worst": _over(np.max, there),
            "exact_share": float(np.mean(np.nan_to_num(errors, nan=math.inf) < EXACT)),
            "error_estimate_median": _over(np.median, [estimate for _, estimate in pairs]),
            "estimate_holds": _over(np.mean, [error <= estimate for error, estimate in pairs]),
            "condition_median": _over(np.median, columns["condition"]),
            "residual_median": _over(np.median, columns["residual"]),
            **_labels(self),
            "held_out_score": self.held_out_score,
            **_roots(self),
        }


def write_glm(
    folder: RunFolder,
    settings: GlmSettings,
    split: InformedSplit,
    models: Mapping[str, AttackedModel],
    facts: Mapping[str, Scalar],
) -> dict[str, Scalar]:
    """Score and write all files; the metrics come last and mark the run as complete. Returns the metrics."""
    main, shape = models[""], (-1, *split.targets.image_shape)
    truth = _tensor(main.truth, shape)
    images = {name: _tensor(model.images, shape) for name, model in models.items()}
    nearest = _nearest(split)
    scores = scores_with_baselines(images[""], _tensor(main.means, shape), nearest.double(), truth, _METRICS)
    metrics: dict[str, Scalar] = {"n": len(truth), "n_batches": len(truth), **with_deviations(scores)}
    metrics |= {"lpips": None, "lpips_reason": _NO_LPIPS}
    columns: dict[str, Iterable[float | None]] = {key: scores[key] for key in ("mse", "rmse", "psnr", "ssim")}
    columns |= {f"{key}_rmse": scores[f"baseline_{key}_rmse"] for key in ("mean_image", "nearest_public")}
    for name, model in models.items():
        prefix = f"{name}." if name else ""
        metrics |= {f"{prefix}{key}": value for key, value in model.metrics().items()}
        columns |= {f"{prefix}{key}": values for key, values in model.columns().items()}
    metrics |= {"notes": _notes(models), **facts}
    labels, recovered = torch.from_numpy(main.targets).long(), torch.tensor(main.recovered)
    estimates = [math.nan if one is None else one for one in main.columns()["error_estimate"]]
    write_tensors(
        folder,
        reconstructions=images[""],
        targets=truth,
        nearest_public=nearest,
        labels=labels,
        recovered_labels=recovered,
        class_names=["even", "odd"] if settings.target == "odd" else split.targets.class_names,
    )
    write_bytes(folder.path / BESIDE, save({name: tensor.float() for name, tensor in images.items() if name}))
    write_scores(folder, labels, recovered, estimates, columns)
    write_metrics(folder, metrics, _MEASURES)
    write_page(folder.path)
    return metrics


def _nearest(split: InformedSplit) -> Tensor:
    """For every target the nearest of all other records, `(m, c, h, w)`."""
    records, m = torch.cat([split.targets.images, split.fixed.images]), len(split.targets)
    truth, everyone = split.targets.pixels(), torch.arange(len(records))
    found = [NearestPublic(records[everyone != index]).query(truth[index : index + 1])[1] for index in range(m)]
    return torch.cat(found)


def _labels(model: AttackedModel) -> dict[str, Scalar]:
    if model.needs_targets:
        return {"label_accuracy": None, "label_accuracy_reason": "the label was given"}
    return {"label_accuracy": float(np.mean(np.equal(model.recovered, model.targets)))}


def _roots(model: AttackedModel) -> dict[str, Scalar]:
    """How often the range of pixels decides between the two candidates, and how often the chosen one is right."""
    pairs = [(attempt, true) for attempt, true in zip(model.attempts, model.truth, strict=True) if attempt.other]
    if not pairs:
        return {}
    best = [min(_largest_error(one, true) for one in (attempt.found, attempt.other)) for attempt, true in pairs]
    right = [_largest_error(attempt.found, true) <= least for (attempt, true), least in zip(pairs, best, strict=True)]
    told = [attempt.told for attempt, _ in pairs]
    return {
        "root_told_share": float(np.mean(told)),
        "root_right_share": float(np.mean(right)),
        "root_told_right_share": _over(np.mean, [ok for ok, known in zip(right, told, strict=True) if known]),
        "max_error_best_root_median": float(np.median(best)),
        "max_error_best_root_worst": float(np.max(best)),
    }


def _largest_error(found: GLMReconstruction | None, true: Array) -> float:
    """Of a pixel, before clipping; NaN where nothing was found."""
    return math.nan if found is None else float(np.abs(found.inputs - true).max())


def _notes(models: Mapping[str, AttackedModel]) -> list[str]:
    """The notes of models, solvers and attacks, each once per model."""
    notes = []
    for name, model in models.items():
        said = [*model.fitted.notes]
        # Numbers differ between targets: the first note stands for all with the same beginning.
        alike: dict[str, list[str]] = {}
        for attempt in model.attempts:
            for note in attempt.found.notes if attempt.found else (f"refused: {attempt.refusal}",):
                alike.setdefault(note[:_BEGINNING], []).append(note)
        said += [f"{same[0]} ({len(same)} of {len(model.attempts)} targets)" for same in alike.values()]
        notes += [f"{name or 'the model under attack'}: {note}" for note in said]
    return notes


def _over(statistic: Callable[[Array], Any], values: Iterable[float | None]) -> float | None:
    """A statistic of the values that are there; None without any."""
    known = np.array([value for value in values if value is not None])
    return float(statistic(known)) if len(known) else None


def _tensor(pixels: Array, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(pixels)).view(shape)
