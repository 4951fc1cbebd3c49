"""The page of an attack on generalized linear models: the report of a run, with its errors and error estimates."""

from __future__ import annotations

from pathlib import Path

from lit_recon.reporting.images import image_grid
from lit_recon.reporting.pages import Panel, Picture, build_report
from lit_recon.reporting.plots import COLOURS, MARKS, Plot, Series, draw
from lit_recon.reporting.record import RunRecord, read_arrays
from lit_recon.reporting.wording import ABSENT, Grant, percent, short

#: Reconstructions from the further models, by model name.
BESIDE = "beside.safetensors"

_RELEASE = "the released coefficients and all other records"
_ORIGIN = f"Left the missing record, in the middle what the closed form computes from {_RELEASE}"
#: Columns of the tables of all models and of all records.
_METRICS = (
    *("max_error_median", "max_error_worst", "exact_share", "condition_median", "error_estimate_median"),
    *("estimate_holds", "held_out_score"),
)
_ERRORS = ("residual", "condition", "error_estimate", "max_error")
#: Records in the picture of all models.
_SHOWN = 12
#: Smallest error that is drawn: a logarithmic axis has no zero, and smaller errors are rounding.
_FLOOR = 1e-17


def write_page(folder: Path) -> Path:
    """Write the page of a finished run of `reconn.py glm`; see `build_report`."""
    return build_report(folder, _ORIGIN, grants, panels)


def grants(record: RunRecord) -> list[Grant]:
    """What the informed adversary knew and did not know."""
    n = record.metrics.get("n_records")
    known = n - 1 if isinstance(n, int) else "all others"
    found = [
        Grant(True, f"All records but one, {known} of them, with their labels."),
        Grant(True, "The released coefficients, and the objective that they minimize: family and penalty."),
        Grant(True, "The solver and its tolerance, for the error estimate only."),
        Grant(False, "The missing record. It was used only after the attack, to score it."),
        Grant(False, "Initial weights and order of records: the minimum does not depend on them."),
    ]
    if any(key.endswith("root_told_share") for key in record.metrics):
        found.append(Grant(True, "For models without intercept: the missing record's label (theorem 8)."))
    return found


def panels(record: RunRecord) -> list[Panel]:
    """The errors of all models, their estimates, and the results for every record."""
    beside = [key.removesuffix(".regression") for key in record.metrics if key.endswith(".regression")]
    prefixes = {"": "", **{name: f"{name}." for name in beside}}
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
                    *(f"#{row.id}", str(row.label), str(row.recovered_label) if row.recovered_label >= 0 else ABSENT),
                    *(short(row.scores.get(key), 2) for key in _ERRORS),
                ]
                for row in record.victims
            ],
            folded=True,
        ),
    ]


def _title(name: str) -> str:
    return name.replace("_", " ") if name else "under attack"


def _row(record: RunRecord, name: str, prefix: str) -> list[str]:
    values = {key: record.number(f"{prefix}{key}") for key in _METRICS}
    return [
        f"{_title(name)}: {record.text(f'{prefix}regression')}",
        f"{record.text(f'{prefix}refused')} of {len(record.victims)}",
        *(percent(x) if key in ("exact_share", "estimate_holds") else short(x, 2) for key, x in values.items()),
    ]


def _pictures(record: RunRecord, prefixes: dict[str, str]) -> list[Panel]:
    rows = {"true record": record.targets, "under attack": record.reconstructions}
    path = record.folder.path / BESIDE
    beside = read_arrays(path) if path.is_file() else {}
    rows |= {_title(name): beside[name] for name in prefixes if name in beside}
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
        keys = ("root_told_share", "root_told_right_share", "root_right_share", "max_error_best_root_worst")
        *shares, best = (record.number(f"{prefix}{key}") for key in keys)
        if shares[0] is not None:
            rows.append([_title(name), *map(percent, shares), short(best, 2)])
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
