"""The page of a study of reconstruction robustness: error and accuracy, bounds and attacks, priors, checks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_recon.bounds import concentrated_bound, gaussian_bound
from lit_recon.metrics.aggregate import recorded_error
from lit_recon.reporting.images import image_grid
from lit_recon.reporting.pages import Page, Panel, Picture, notes_panels
from lit_recon.reporting.plots import COLOURS, MARKS, Plot, Series, draw
from lit_recon.reporting.provenance import find_setting, read_settings
from lit_recon.reporting.record import read_arrays, read_json, read_metrics
from lit_recon.reporting.run_folder import RunFolder
from lit_recon.reporting.wording import ABSENT, format_score, percent, power_of_ten, short, with_error

#: What the page is built from, and the same as a table.
RECORD, TABLE = "rero.json", "rero.csv"
#: Of a success rate against its bound; None where the bound is an estimate.
_JUDGEMENT = {True: "below", False: "ABOVE", None: "(estimate)"}
#: Target images in the picture.
_SHOWN = 12
#: Left and right of the epsilons in plots, as a factor.
_MARGIN = 1.5
#: Significant digits of the bounds for sampled batches.
_DIGITS = {"rate": 6, "epsilon": 6, "noise_multiplier": 4, "kappa": 6, "closed": 5, "profile": 5}
_INK = "#3b4252"
_DASHED = (0, (4.0, 2.0))


def write_page(folder: Path) -> Path:
    """Write the page of a finished run of `reconn.py rero` into its folder; raises as `build_report` does."""
    run = RunFolder(folder)
    run.require_finished()
    record = read_json(run.path / RECORD)
    settings = read_settings(run.config)
    kappas = find_setting(settings, "prior.kappas")
    page = Page(
        kind="Reconstruction robustness",
        settings=settings,
        facts=read_metrics(run.metrics),
        lead=_verdict(record),
        panels=[
            _errors(record),
            _images(run, record),
            _attacks(record),
            _bounds(record, [float(str(kappa)) for kappa in kappas] if isinstance(kappas, list) else []),
            _priors(record),
            *_sampled(record),
            *_equivalence(record),
            *notes_panels(_notes(record)),
        ],
        files={
            "metrics.json": "all metrics",
            TABLE: "every bound and success rate",
            RECORD: "the data of this page",
            "cells/": "a run folder with its own page for every budget",
            "config.yaml": "the settings",
        },
    )
    return page.write(run.report)


def _verdict(record: Mapping[str, Any]) -> str:
    private, plain = _private(record), _named(record, "plain")
    parts = [
        f"At epsilon {short(cell['epsilon'], 6)} the attack's MSE is {_mse(cell)} and the released models' accuracy is "
        f"{percent(cell['accuracy'])}"
        for cell in (private[-1], private[0])
    ]
    first = f"{parts[0]}; {parts[1][0].lower()}{parts[1][1:]}" if len(private) > 1 else parts[0]
    mean = f"The MSE of the mean image is {_mse(private[0], 'baseline_mean_image_mse')}"
    without = f", that of the attack without noise {_mse(plain)}" if plain else ""
    return f"{first}. {mean}{without}. {judged(record)}"


def verdicts(record: Mapping[str, Any]) -> tuple[list[bool], int]:
    """Whether each success rate lies below its bound, where that is below 1; and how many others have a bound of 1."""
    rows = [row for cell in record["cells"] for row in cell["comparisons"] if row["below"] is not None]
    compared = [row["below"] for row in rows if row["tight"] < 1]
    return compared, len(rows) - len(compared)


def judged(record: Mapping[str, Any]) -> str:
    """A sentence on the success rates beside their bounds."""
    compared, idle = verdicts(record)
    others = f" (in {idle} more the bound is 1, which allows any rate)" if idle else ""
    if not compared:
        return f"No success rate was compared with a bound below 1{others}."
    if not all(compared):
        above = compared.count(False)
        return f"{above} of {len(compared)} success rates lie above their bound: see the table{others}."
    n = f"{len(compared)} comparison{'s' * (len(compared) > 1)}"
    return f"No attack succeeded more often than its bound allows, beyond chance, in {n}{others}."


def _notes(record: Mapping[str, Any]) -> list[str]:
    caveats = sorted({prior["caveat"] for prior in record["priors"]} - {""})
    unknown, plain = _named(record, "unknown_initialization"), _named(record, "plain")
    found = [f"Caveat of a baseline error: {caveat}." for caveat in caveats]
    if unknown and plain:
        found.append(
            f"Without noise and with known initial weights the attack's MSE is {_mse(plain)}; where every model has "
            f"different initial weights, unknown to the attacker, it is {_mse(unknown)}, and that of the mean image is "
            f"{_mse(unknown, 'baseline_mean_image_mse')}."
        )
    return [
        *found,
        (
            "Epsilon is that of the whole training, exact for full batches. The bounds compare the weights trained "
            "with the unknown image to those trained without it, whichever neighboring relation epsilon is stated for."
        ),
        (
            "The attacks observe the final weights only; the bounds hold for an adversary who observes every step, and "
            "such an adversary reaches them. An attack far below its bound may be a weak attack."
        ),
        (
            "Success rates have 95 % intervals (Clopper and Pearson); a rate counts as above its bound if the whole "
            "interval is."
        ),
        f"Accuracy: mean over at most 20 released models, on {record['n_test_images']} held-out images.",
    ]


def _errors(record: Mapping[str, Any]) -> Panel:
    private, plain, clipped = _private(record), _named(record, "plain"), _named(record, "clipped")
    levels = {"mean image": private[0]["baseline_mean_image_mse"], "nearest other image": private[0]["oracle_mse"]}
    levels |= {"attack, no clipping or noise": plain["mse"]} if plain else {}
    levels |= {"attack, clipped only": clipped["mse"]} if clipped else {}
    epsilons, accuracies = ([cell[key] for cell in private] for key in ("epsilon", "accuracy"))
    errors = [math.nan if (error := _error(cell)) is None else error for cell in private]
    series = [
        Series("attack", epsilons, [c["mse"] for c in private], "-", "o", COLOURS[0], errors=errors),
        Series("accuracy (right)", epsilons, accuracies, "-", "s", COLOURS[1], right=True),
    ]
    limits = (min(epsilons) / _MARGIN, max(epsilons) * _MARGIN)
    if clipped:
        level = [clipped["accuracy"]] * 2
        series.append(
            Series("accuracy without noise (right)", limits, level, "--", colour=COLOURS[1], width=1, right=True)
        )
    plot = Plot(
        x_label="epsilon",
        y_label="mean squared error",
        right_label="accuracy of released models",
        series=series,
        levels=levels,
        x_scale="log",
        x_range=limits,
        y_range=(0, None),
    )
    return Panel(
        "Error and accuracy",
        "How well the attack reconstructs, and how well the released models classify, as the privacy budget grows. ± "
        "is the standard error over the target images.",
        [Picture(draw([plot]), "Error of the attack and accuracy of released models against epsilon")],
        header=["Released models", "Noise multiplier", "MSE of the attack", "of the mean image", "Accuracy"],
        rows=[
            [
                cell["title"],
                short(cell.get("noise_multiplier"), 4),
                with_error("mse", cell["mse"], _error(cell)),
                _mse(cell, "baseline_mean_image_mse"),
                percent(cell["accuracy"], 1),
            ]
            for cell in record["cells"]
        ],
    )


def _images(run: RunFolder, record: Mapping[str, Any]) -> Panel:
    rows: dict[str, Any] = {}
    for cell in record["cells"]:
        path = RunFolder(run.path / cell["folder"]).reconstructions
        images = read_arrays(path, "delete the cell and run it again")
        rows.setdefault("true image", images["targets"][:_SHOWN])
        rows[cell["title"]] = images["reconstructions"][:_SHOWN]
    return Panel(
        "Reconstructions",
        "The first target images, and their reconstructions from the models released under each budget.",
        [Picture(image_grid(rows, columns=_SHOWN), "True images and reconstructions by budget")],
    )


def _attacks(record: Mapping[str, Any]) -> Panel:
    named = [prior for prior in record["priors"] if prior["threshold"] is None]
    within = [p for p in record["priors"] if p["threshold"] is not None and p["name"].endswith("certified")]
    kinds = (
        (named, "bound", "Chance of identifying the image among candidates against epsilon"),
        (within, "bound (certified kappa)", "Chance of a reconstruction within a threshold against epsilon"),
    )
    pictures = [Picture(_rates(record, priors, words), text) for priors, words, text in kinds if priors]
    return Panel(
        "Attacks and their bounds",
        "First, identifying the unknown image among equally likely candidates, by training on each candidate without "
        "noise; kappa is exact. Second, reconstructions within a mean squared error of the target image, which is "
        "drawn from the images that kappa was measured on. Certified: an upper bound on kappa from the images within "
        "twice the distance, which says little for large thresholds. Otherwise kappa is searched for among the images, "
        "an estimate that may be exceeded.",
        pictures,
        header=["Epsilon", "Success", "Kappa", "Bound", "Attack", "95 % interval", "Attack is"],
        rows=[
            [
                short(cell["epsilon"], 6),
                _success(row),
                power_of_ten(row["log10_kappa"]),
                short(row["tight"]),
                short(row["success_rate"]),
                f"{short(row['low'])} to {short(row['high'])}",
                _JUDGEMENT[row["below"]],
            ]
            for cell, row in _compared(record)
            if row["success_rate"] is not None
        ],
        folded=True,
    )


def _rates(record: Mapping[str, Any], priors: Sequence[Mapping[str, Any]], words: str) -> bytes:
    """The bound of each prior over epsilon (SVG), with the attack's success rates."""
    series = []
    for index, prior in enumerate(priors):
        colour, threshold = COLOURS[index % len(COLOURS)], prior["threshold"]
        title = _within(prior, prior["name"])
        epsilons = [point["epsilon"] for point in record["curve"]]
        bounds = [gaussian_bound(prior["log10_kappa"] * math.log(10), point["mu"]) for point in record["curve"]]
        series.append(Series(title, epsilons, bounds, colour=colour, width=1.8))
        found = [
            (cell["epsilon"], row["success_rate"], row["low"], row["high"])
            for cell, row in _compared(record)
            if row["prior"] == prior["name"] and row["threshold"] == threshold and row["success_rate"] is not None
        ]
        if found:
            places, rates, lows, highs = zip(*found, strict=True)
            below = [max(0.0, rate - low) for rate, low in zip(rates, lows, strict=True)]
            above = [max(0.0, high - rate) for rate, high in zip(rates, highs, strict=True)]
            series.append(Series("", places, rates, "", MARKS[index % len(MARKS)], colour, errors=(below, above)))
    series.append(Series(words, [], [], colour=_INK, width=1.8))
    series.append(Series("attack, 95 % interval", [], [], "", "o", _INK))
    return _chances(record, series, "linear", (-0.03, 1.05))


def _chances(record: Mapping[str, Any], series: Sequence[Series], scale: str, limits: tuple[float, float]) -> bytes:
    epsilons = [point["epsilon"] for point in record["curve"]]
    span = (min(epsilons) / _MARGIN, max(epsilons) * _MARGIN)
    plot = Plot(
        "", "epsilon", "chance of success", "", series, x_scale="log", y_scale=scale, x_range=span, y_range=limits
    )
    return draw([plot], size=(6.6, 4.4))


def _bounds(record: Mapping[str, Any], kappas: Sequence[float]) -> Panel:
    curve, series, pictures = record["curve"], list[Series](), list[Picture]()
    epsilons = [point["epsilon"] for point in curve]
    for index, kappa in enumerate(sorted(kappas, reverse=True)):
        colour = COLOURS[index % len(COLOURS)]
        tight = [gaussian_bound(math.log(kappa), point["mu"]) for point in curve]
        loose = [concentrated_bound(math.log(kappa), point["mu"] ** 2 / 2) for point in curve]
        series.append(Series(f"kappa {short(kappa)}", epsilons, tight, colour=colour, width=1.8))
        series.append(Series("", epsilons, loose, _DASHED, colour=colour, width=1.1))
    series.append(Series("tight (Gaussian noise)", [], [], colour=_INK, width=1.8))
    series.append(Series("corollary 4", [], [], _DASHED, colour=_INK, width=1.1))
    if kappas:
        drawn = _chances(record, series, "log", (1e-5, 1.6))
        pictures.append(Picture(drawn, "Bounds on the chance of success against epsilon"))
    return Panel(
        "Bounds",
        "Upper bounds on the success probability of any attack, by the probability kappa of success without the "
        "release. The smaller kappa is, the larger the epsilon that still protects.",
        pictures,
        header=["Epsilon", "Success and prior", "Kappa", "Tight", "Theorem 2", "Cor. 4", "Cor. 3", "(ε, δ) alone"],
        rows=[
            [
                short(cell["epsilon"], 6),
                _success(row),
                power_of_ten(row["log10_kappa"]),
                *(short(row[name]) for name in ("tight", "theorem_2", "corollary_4", "corollary_3", "approximate")),
            ]
            for cell, row in _compared(record)
        ],
        note="Corollary 3 is for pure epsilon-DP, which Gaussian noise does not give: it is shown for comparison.",
        folded=True,
    )


def _priors(record: Mapping[str, Any]) -> Panel:
    return Panel(
        "Baseline errors",
        "Kappa: the success probability of the best guess without the release. The ball and the Gaussian have the mean "
        f"and variance of the {record['n_prior_samples']} images of the empirical prior, and no other knowledge of "
        "images.",
        header=["Prior", "Success", "Kappa", "Caveat"],
        rows=[
            [
                prior["name"],
                _within(prior, "identified"),
                power_of_ten(prior["log10_kappa"]),
                "see notes" if prior["caveat"] else "none",
            ]
            for prior in record["priors"]
        ],
    )


def _sampled(record: Mapping[str, Any]) -> list[Panel]:
    if not record["sampled"]:
        return []
    names = ("Sampling rate", "Epsilon", "Noise multiplier", "Kappa", "Closed form", "Distributions", "Simulation")
    return [
        Panel(
            "Sampled batches",
            f"The tight bound for {record['steps']} steps on Poisson-sampled batches: from privacy-loss distributions, "
            "which never fall below it; by simulation; and for full batches in closed form.",
            header=names,
            rows=[
                [
                    *(short(row[key], digits) for key, digits in _DIGITS.items()),
                    ABSENT
                    if row["simulated"] is None
                    else f"{short(row['simulated'], 5)} ± {short(row['standard_error'], 1)}",
                ]
                for row in record["sampled"]
            ],
        )
    ]


def _equivalence(record: Mapping[str, Any]) -> list[Panel]:
    rows = [cell["equivalence"] for cell in _private(record) if cell["equivalence"] is not None]
    if not rows:
        return []
    keys = ("epsilon", "guess", "gamma", "delta", "delta_from_gamma")
    return [
        Panel(
            "From reconstruction back to privacy",
            "Theorem 5: two candidates whose prior odds are e to the epsilon. The success probability of the best "
            "attack follows from the training's delta (one record replaced by another), and vice versa.",
            header=["Epsilon", "Guess", "Best attack", "Delta", "Delta from the attack"],
            rows=[[short(row[key], 6) for key in keys] for row in rows],
        )
    ]


def _private(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    return sorted((cell for cell in record["cells"] if cell["epsilon"] is not None), key=lambda cell: cell["epsilon"])


def _compared(record: Mapping[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Every private cell with every comparison of it."""
    return [(cell, row) for cell in _private(record) for row in cell["comparisons"]]


def _named(record: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    return next((cell for cell in record["cells"] if cell["name"] == name), None)


def _mse(cell: Mapping[str, Any], key: str = "mse") -> str:
    return format_score("mse", cell[key])


def _error(cell: Mapping[str, Any]) -> float | None:
    """Standard error of a cell's MSE, every target image a batch of its own; None for a single one."""
    return recorded_error({**cell, "n_batches": cell["n"]}, "mse")


def _success(row: Mapping[str, Any]) -> str:
    return row["prior"] if row["threshold"] is None else f"{_within(row)}, {row['prior']}"


def _within(prior: Mapping[str, Any], identified: str = "") -> str:
    """The criterion of success; for a finite prior, whose image is to be identified, the given words."""
    return identified if prior["threshold"] is None else f"MSE up to {prior['threshold']:g}"
