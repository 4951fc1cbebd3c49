"""The page of an attack on generalized linear models: the report of a run, with its errors beside its estimates."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from lit_recon.errors import CorruptFileError
from lit_recon.reporting.pages import Panel, build_report, picture
from lit_recon.reporting.plots import error_scatter, image_grid
from lit_recon.reporting.record import RunRecord
from lit_recon.reporting.wording import ABSENT, Grant

#: The reconstructions of the models beside the one under attack, by their names.
BESIDE = "beside.safetensors"

_ORIGIN = (
    "Left the one record that the adversary lacks, in the middle what the closed form computes from the released "
    "coefficients and all other records"
)
#: Targets in the picture of all models.
_SHOWN = 12


def write_page(folder: Path) -> Path:
    """Write the page of a finished run of `reconn.py glm` into its folder, from the files in it alone.

    Raises:
        MissingDataError: the folder holds no finished run.
        CorruptFileError: one of its files is malformed.
    """
    return build_report(folder, _ORIGIN, grants, panels)


def grants(record: RunRecord) -> list[Grant]:
    """What the informed adversary knew, then what not."""
    n = record.metrics.get("n_records")
    others = f"All records but one, {n - 1 if isinstance(n, int) else 'all others'} of them, with their targets."
    found = [
        Grant(True, others),
        Grant(True, "The released coefficients, and which objective they minimize: its family, its penalty."),
        Grant(True, "The solver and its tolerance, for the error estimate alone."),
        Grant(False, "The missing record. It served only after the attack, to score it."),
        Grant(False, "How training went: neither initial weights nor the order of records matters to a minimum."),
    ]
    if any(key.endswith("root_told_share") for key in record.metrics):
        found.append(Grant(True, "For models without intercept alone: the missing record's target (theorem 8)."))
    return sorted(found, key=lambda grant: not grant.known)


def panels(record: RunRecord) -> list[Panel]:
    """The errors of all models, their estimates, and every target's figures."""
    prefixes = {name: f"{name}." if name else "" for name in _models(record)}
    return [
        Panel(
            "How exact",
            "Largest error of a pixel in [0, 1], before any clipping, over the targets. A level of gray is 4e-3; below "
            "1e-6 counts as exact. Condition: by how much an entry of the gradient that the solver left moves a pixel, "
            "at most. Estimate: that gradient's bound times the condition, known to the attacker; it holds where the "
            "error is not above it.",
            header=["Model", "Refused", "Median", "Worst", "Exact", "Condition", "Estimate", "holds", "Held-out score"],
            rows=[_row(record, name, prefix) for name, prefix in prefixes.items()],
            note="Held-out score: accuracy of classifiers; share of variance (least squares) or of deviance (Poisson) "
            "explained otherwise. A model that predicts badly gives records away as well as one that predicts well.",
        ),
        *_pictures(record, prefixes),
        *_roots(record, prefixes),
        Panel(
            "Every target",
            header=["Target", "Class", "Recovered", "|Residual|", "Condition", "Estimate", "Largest error"],
            rows=[
                [
                    f"#{row.id}",
                    str(row.label),
                    str(row.recovered_label) if row.recovered_label >= 0 else ABSENT,
                    *(_short(row.scores.get(key)) for key in ("residual", "condition", "error_estimate", "max_error")),
                ]
                for row in record.victims
            ],
            folded=True,
        ),
    ]


def _models(record: RunRecord) -> list[str]:
    """Names of the models; that of the one under attack is empty."""
    ending = ".regression"
    return ["", *(key.removesuffix(ending) for key in record.metrics if key.endswith(ending))]


def _title(name: str) -> str:
    return name.replace("_", " ") if name else "under attack"


def _row(record: RunRecord, name: str, prefix: str) -> list[str]:
    def figure(key: str) -> str:
        return _short(record.number(f"{prefix}{key}"))

    def share(key: str) -> str:
        value = record.number(f"{prefix}{key}")
        return ABSENT if value is None else f"{value:.0%}"

    return [
        f"{_title(name)}: {record.text(f'{prefix}regression')}",
        f"{record.text(f'{prefix}refused')} of {len(record.victims)}",
        figure("max_error_median"),
        figure("max_error_worst"),
        share("exact_share"),
        figure("condition_median"),
        figure("error_estimate_median"),
        share("estimate_holds"),
        figure("held_out_score"),
    ]


def _pictures(record: RunRecord, prefixes: dict[str, str]) -> list[Panel]:
    points = {}
    for name, prefix in prefixes.items():
        pairs = [
            (row.scores.get(f"{prefix}error_estimate"), row.scores.get(f"{prefix}max_error")) for row in record.victims
        ]
        points[_title(name)] = [(a, b) for a, b in pairs if a is not None and b is not None]
    rows = {"true record": record.targets, "under attack": record.reconstructions}
    rows |= {_title(name): images for name, images in _beside(record).items()}
    if record.nearest_public is not None:
        rows["nearest other"] = record.nearest_public
    grid = image_grid({label: images[:_SHOWN] for label, images in rows.items()}, columns=_SHOWN)
    shown = min(_SHOWN, len(record.victims))
    scatter = picture(error_scatter(points), "svg")
    return [
        Panel(
            "The same records from every model",
            f"The first {shown} targets, clipped to [0, 1]; where an attack refuses, the mean of all other records "
            "stands in its place.",
            pictures=[(picture(grid, "png"), "The true records and what the attack makes of each model")],
        ),
        Panel(
            "Error and estimate",
            "One point for each target and model. The attacker knows the estimate only; points below the dashed line "
            "keep its promise. Shaded: errors that no eye can see, below one level of gray.",
            pictures=[(scatter, "Largest error of a pixel against the attacker's estimate")],
        ),
    ]


def _roots(record: RunRecord, prefixes: dict[str, str]) -> list[Panel]:
    rows = []
    for name, prefix in prefixes.items():
        told, right, best, ok = (
            record.number(f"{prefix}{key}")
            for key in ("root_told_share", "root_right_share", "max_error_best_root_worst", "root_told_right_share")
        )
        if told is not None and right is not None:
            rows.append(
                [_title(name), f"{told:.0%}", ABSENT if ok is None else f"{ok:.0%}", f"{right:.0%}", _short(best)]
            )
    if not rows:
        return []
    return [
        Panel(
            "Two roots",
            "Without an intercept two records fit the released coefficients, one of them true (theorem 8). Only one "
            "of them may lie in the range of pixels, which then tells which; else the one with the smaller residual "
            "is taken, which is right more often than not.",
            header=["Model", "Range tells", "Right where it tells", "Right of all", "Worst error of the better root"],
            rows=rows,
        )
    ]


def _beside(record: RunRecord) -> dict[str, NDArray[np.float32]]:
    path = record.folder.path / BESIDE
    if not path.is_file():
        return {}
    try:
        found = load_file(path)
    except (SafetensorError, ValueError) as error:
        raise CorruptFileError(f"{path} is no safetensors file ({error}): restore it or repeat the run") from error
    order = [name for name in _models(record) if name in found]
    return {name: found[name] for name in order if found[name].shape == record.targets.shape}


def _short(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.2g}"
