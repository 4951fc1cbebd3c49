"""The page of an attack on generalized linear models: the report of a run, with its errors and error estimates."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from lit_recon.errors import CorruptFileError
from lit_recon.reporting.pages import Panel, Picture, build_report
from lit_recon.reporting.plots import COLOURS, MARKS, Plot, Series, draw, image_grid
from lit_recon.reporting.record import RunRecord
from lit_recon.reporting.wording import ABSENT, Grant, percent, short

#: Reconstructions from the further models, by model name.
BESIDE = "beside.safetensors"

_ORIGIN = (
    "Left the missing record, in the middle what the closed form computes from the released coefficients and all other "
    "records"
)
#: Records in the picture of all models.
_SHOWN = 12
#: Smallest error that is drawn: a logarithmic axis has no zero, and smaller errors are rounding.
_FLOOR = 1e-17


def write_page(folder: Path) -> Path:
    """Write the page of a finished run of `reconn.py glm` into its folder, from the files in it alone.

    Raises:
        MissingDataError: the folder holds no finished run.
        CorruptFileError: one of its files is malformed.
    """
    return build_report(folder, _ORIGIN, grants, panels)


def grants(record: RunRecord) -> list[Grant]:
    """The informed adversary's knowledge, then what was not known."""
    n = record.metrics.get("n_records")
    others = f"All records but one, {n - 1 if isinstance(n, int) else 'all others'} of them, with their labels."
    found = [
        Grant(True, others),
        Grant(True, "The released coefficients, and the objective that they minimize: family and penalty."),
        Grant(True, "The solver and its tolerance, for the error estimate only."),
        Grant(False, "The missing record. It was used only after the attack, to score it."),
        Grant(False, "Initial weights and order of records: the minimum does not depend on them."),
    ]
    if any(key.endswith("root_told_share") for key in record.metrics):
        found.append(Grant(True, "For models without intercept: the missing record's label (theorem 8)."))
    return sorted(found, key=lambda grant: not grant.known)


def panels(record: RunRecord) -> list[Panel]:
    """The errors of all models, their estimates, and the results for every record."""
    prefixes = {name: f"{name}." if name else "" for name in _models(record)}
    return [
        Panel(
            "Accuracy of the reconstructions",
            "Largest error of a pixel in [0, 1] before clipping, over the attacked records; one grey level is 0.004, "
            "and below 1e-6 a reconstruction counts as exact. Condition: the largest change of a pixel per unit of "
            "gradient that the solver left. Estimate: the product of condition and remaining gradient, which the "
            "attacker can compute; it holds where the error is at most as large.",
            header=["Model", "Refused", "Median", "Worst", "Exact", "Condition", "Estimate", "holds", "Held-out score"],
            rows=[_row(record, name, prefix) for name, prefix in prefixes.items()],
            note="Held-out score: accuracy for classifiers; explained share of variance (least squares) or deviance "
            "(Poisson) otherwise. Models with poor held-out scores leak records just as good ones do.",
        ),
        *_pictures(record, prefixes),
        *_roots(record, prefixes),
        Panel(
            "All attacked records",
            header=["Record", "Class", "Recovered", "|Residual|", "Condition", "Estimate", "Largest error"],
            rows=[
                [
                    f"#{row.id}",
                    str(row.label),
                    str(row.recovered_label) if row.recovered_label >= 0 else ABSENT,
                    *(
                        short(row.scores.get(key), 2)
                        for key in ("residual", "condition", "error_estimate", "max_error")
                    ),
                ]
                for row in record.victims
            ],
            folded=True,
        ),
    ]


def _models(record: RunRecord) -> list[str]:
    """Names of the models; the one under attack has an empty name."""
    ending = ".regression"
    return ["", *(key.removesuffix(ending) for key in record.metrics if key.endswith(ending))]


def _title(name: str) -> str:
    return name.replace("_", " ") if name else "under attack"


def _row(record: RunRecord, name: str, prefix: str) -> list[str]:
    def number(key: str) -> float | None:
        return record.number(f"{prefix}{key}")

    return [
        f"{_title(name)}: {record.text(f'{prefix}regression')}",
        f"{record.text(f'{prefix}refused')} of {len(record.victims)}",
        short(number("max_error_median"), 2),
        short(number("max_error_worst"), 2),
        percent(number("exact_share")),
        short(number("condition_median"), 2),
        short(number("error_estimate_median"), 2),
        percent(number("estimate_holds")),
        short(number("held_out_score"), 2),
    ]


def _pictures(record: RunRecord, prefixes: dict[str, str]) -> list[Panel]:
    rows = {"true record": record.targets, "under attack": record.reconstructions}
    rows |= {_title(name): images for name, images in _beside(record).items()}
    if record.nearest_public is not None:
        rows["nearest other"] = record.nearest_public
    grid = image_grid({label: images[:_SHOWN] for label, images in rows.items()}, columns=_SHOWN)
    plot = draw([_estimates(record, prefixes)], size=(5.6, 4.8))
    return [
        Panel(
            "The same records from every model",
            f"The first {min(_SHOWN, len(record.victims))} records, clipped to [0, 1]; where an attack refuses, the "
            "mean of all other records is shown.",
            [Picture(grid, "The true records and their reconstructions from each model")],
        ),
        Panel(
            "Error and estimate",
            "One point per record and model. The attacker knows the estimate only; it holds for points on and below "
            "the dashed line. Errors below the dotted line, one grey level, are invisible.",
            [Picture(plot, "Largest error of a pixel against the attacker's estimate")],
        ),
    ]


def _estimates(record: RunRecord, prefixes: dict[str, str]) -> Plot:
    series, everything = list[Series](), list[float]()
    for index, (name, prefix) in enumerate(prefixes.items()):
        pairs = [
            (max(estimate, _FLOOR), max(error, _FLOOR))
            for row in record.victims
            if (estimate := row.scores.get(f"{prefix}error_estimate")) is not None
            and (error := row.scores.get(f"{prefix}max_error")) is not None
        ]
        if pairs:
            xs, ys = zip(*pairs, strict=True)
            everything += [*xs, *ys]
            series.append(Series(_title(name), xs, ys, "", MARKS[index % len(MARKS)], COLOURS[index % len(COLOURS)]))
    if everything:
        span = (min(everything), max(everything))
        series.append(Series("error = estimate", span, span, "--"))
    return Plot(
        x_label="error estimate, known to the attacker",
        y_label="largest error of a pixel",
        x_scale="log",
        y_scale="log",
        series=series,
        levels={"one grey level": 1 / 255},
        message="no attack succeeded",
    )


def _roots(record: RunRecord, prefixes: dict[str, str]) -> list[Panel]:
    rows = []
    for name, prefix in prefixes.items():
        decided, right, best, sure = (
            record.number(f"{prefix}{key}")
            for key in ("root_told_share", "root_right_share", "max_error_best_root_worst", "root_told_right_share")
        )
        if decided is not None and right is not None:
            rows.append([_title(name), percent(decided), percent(sure), percent(right), short(best, 2)])
    if not rows:
        return []
    return [
        Panel(
            "Two solutions without intercept",
            "Without an intercept two records fit the released coefficients, and one of them is true (theorem 8). If "
            "only one lies in the range of pixels, it is taken; otherwise the one with the smaller residual, which is "
            "right more often than not.",
            header=[
                "Model",
                "Decided by range",
                "of these right",
                "Right in all",
                "Worst error of the better solution",
            ],
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
        raise CorruptFileError(
            f"{path} is no valid safetensors file ({error}): restore it or repeat the run"
        ) from error
    order = [name for name in _models(record) if name in found]
    return {name: found[name] for name in order if found[name].shape == record.targets.shape}
