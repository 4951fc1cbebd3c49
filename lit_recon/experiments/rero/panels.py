"""The sections of the page of a study of reconstruction robustness, each from the study's record."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from safetensors import SafetensorError
from safetensors.numpy import load_file

from lit_recon.bounds import concentrated_bound, gaussian_bound
from lit_recon.errors import CorruptFileError
from lit_recon.reporting.pages import Panel, picture
from lit_recon.reporting.plots import image_grid
from lit_recon.reporting.robustness_curves import Bounded, Measured, error_and_accuracy, robustness_curves
from lit_recon.reporting.run_folder import RunFolder
from lit_recon.reporting.wording import ABSENT

#: What the page is built from, and the same as a table.
RECORD, TABLE = "rero.json", "rero.csv"
#: Of a success rate against its bound; None where the bound is an estimate.
_JUDGEMENT = {True: "below", False: "ABOVE", None: "(estimate)"}
#: Targets in the picture.
_SHOWN = 12
_CERTIFIED = "certified"


def error_panel(record: Mapping[str, Any]) -> Panel:
    """The attack's error and the accuracy of what it attacks, by budget."""
    private, plain, clipped = private_cells(record), named_cell(record, "plain"), named_cell(record, "clipped")
    levels = {"mean image": private[0]["baseline_mean_image_mse"], "nearest other image": private[0]["oracle_mse"]}
    levels |= {"attack, no clipping or noise": plain["mse"]} if plain else {}
    levels |= {"attack, clipped only": clipped["mse"]} if clipped else {}
    drawn = error_and_accuracy(
        [cell["epsilon"] for cell in private],
        [cell["mse"] for cell in private],
        [cell["mse_std"] / math.sqrt(cell["n"]) for cell in private],
        [cell["accuracy"] for cell in private],
        levels,
        clipped["accuracy"] if clipped else None,
    )
    header = ["Released models", "Noise multiplier", "Attack's MSE", "of mean image", "Accuracy"]
    rows = [
        [
            cell["title"],
            ABSENT if cell.get("noise_multiplier") is None else f"{cell['noise_multiplier']:.4g}",
            f"{cell['mse']:.4f} ± {cell['mse_std'] / math.sqrt(cell['n']):.4f}",
            f"{cell['baseline_mean_image_mse']:.4f}",
            f"{cell['accuracy']:.1%}",
        ]
        for cell in record["cells"]
    ]
    return Panel(
        "Error and accuracy",
        "How well the attack reconstructs, and how well the released models classify, as the budget grows. ± is the "
        "standard error over the targets.",
        pictures=[(picture(drawn, "svg"), "Error of the attack and accuracy of released models against epsilon")],
        header=header,
        rows=rows,
    )


def picture_panel(run: RunFolder, record: Mapping[str, Any]) -> Panel:
    """The first targets and what the attack makes of them, one row per cell.

    Raises:
        CorruptFileError: a cell's images cannot be read.
    """
    rows: dict[str, Any] = {}
    for cell in record["cells"]:
        path = RunFolder(run.path / cell["folder"]).reconstructions
        try:
            images = load_file(path)
        except (SafetensorError, OSError, ValueError) as error:
            raise CorruptFileError(f"{path} cannot be read ({error}): delete the cell and run it again") from error
        rows.setdefault("true image", images["targets"][:_SHOWN])
        rows[cell["title"]] = images["reconstructions"][:_SHOWN]
    return Panel(
        "What the attack sees",
        "The first targets, and what the attack makes of the models that were released under each budget.",
        pictures=[(picture(image_grid(rows, columns=_SHOWN), "png"), "True images and reconstructions by budget")],
    )


def attack_panel(record: Mapping[str, Any]) -> Panel:
    """Success rates beside the bounds that they may not exceed."""
    named, within = dict[str, Bounded](), dict[str, Bounded]()
    for prior in record["priors"]:
        if prior["threshold"] is None:
            named[prior["name"]] = _bounded(record, prior)
        elif prior["name"].endswith(_CERTIFIED):
            within[f"MSE up to {prior['threshold']:g}"] = _bounded(record, prior)
    pictures = []
    if named:
        drawn = robustness_curves(named, "bound", linear=True)
        pictures.append((picture(drawn, "svg"), "Chance of naming the image among candidates against epsilon"))
    if within:
        drawn = robustness_curves(within, "bound (certified kappa)", linear=True)
        pictures.append((picture(drawn, "svg"), "Chance of a reconstruction within a threshold against epsilon"))
    rows = []
    for cell in private_cells(record):
        for row in cell["comparisons"]:
            if row["success_rate"] is None:
                continue
            rows.append(
                [
                    f"{cell['epsilon']:,g}",
                    row["prior"] if row["threshold"] is None else f"MSE up to {row['threshold']:g}, {row['prior']}",
                    _power(row["log10_kappa"]),
                    f"{row['tight']:.3g}",
                    f"{row['success_rate']:.3g}",
                    f"{row['low']:.3g} to {row['high']:.3g}",
                    _JUDGEMENT[row["below"]],
                ]
            )
    return Panel(
        "Attacks beside their bounds",
        "First, naming the unknown image among so many equally likely candidates, which the attack does by training "
        "on each without noise; kappa is exact. Second, reconstructions (kernel ridge or whichever reconstructor is "
        "set) within a mean squared error of the target, which is drawn from the images that kappa was measured on: "
        "certified by what lies within twice the distance, and so large that the bound says little at wide thresholds; "
        "or sought among them, an estimate that may be exceeded.",
        pictures=pictures,
        header=["Epsilon", "Success", "Kappa", "Bound", "Attack", "95 % interval", "Attack is"],
        rows=rows,
        folded=True,
    )


def _bounded(record: Mapping[str, Any], prior: Mapping[str, Any]) -> Bounded:
    log_kappa = prior["log10_kappa"] * math.log(10)
    epsilons = [point["epsilon"] for point in record["curve"]]
    gammas = [gaussian_bound(log_kappa, point["mu"]) for point in record["curve"]]
    measured = [
        Measured(cell["epsilon"], row["success_rate"], row["low"], row["high"])
        for cell in private_cells(record)
        for row in cell["comparisons"]
        if row["prior"] == prior["name"] and row["threshold"] == prior["threshold"] and row["success_rate"] is not None
    ]
    return Bounded((epsilons, gammas), measured=measured)


def bound_panel(record: Mapping[str, Any], kappas: Sequence[float]) -> Panel:
    """The bounds themselves, for any baseline error."""
    epsilons = [point["epsilon"] for point in record["curve"]]
    curves = {
        f"kappa {kappa:.3g}": Bounded(
            (epsilons, [gaussian_bound(math.log(kappa), point["mu"]) for point in record["curve"]]),
            (epsilons, [concentrated_bound(math.log(kappa), point["mu"] ** 2 / 2) for point in record["curve"]]),
        )
        for kappa in sorted(kappas, reverse=True)
    }
    rows = [
        [
            f"{cell['epsilon']:,g}",
            row["prior"] if row["threshold"] is None else f"MSE up to {row['threshold']:g}, {row['prior']}",
            _power(row["log10_kappa"]),
            *(f"{row[name]:.3g}" for name in ("tight", "theorem_2", "corollary_4", "corollary_3", "approximate")),
        ]
        for cell in private_cells(record)
        for row in cell["comparisons"]
    ]
    pictures = []
    if curves:
        drawn = robustness_curves(curves, "tight (Gaussian noise)", "corollary 4")
        pictures.append((picture(drawn, "svg"), "Bounds on the chance of success against epsilon"))
    return Panel(
        "Bounds",
        "The largest chance that any attack has to succeed, by the chance kappa to succeed without the release. The "
        "less is known beforehand, the larger an epsilon protects.",
        pictures=pictures,
        header=["Epsilon", "Success and prior", "Kappa", "Tight", "Theorem 2", "Cor. 4", "Cor. 3", "(ε, δ) alone"],
        rows=rows,
        note="Corollary 3 is for pure epsilon-DP, which Gaussian noise never gives: it is shown for its size.",
        folded=True,
    )


def prior_panel(record: Mapping[str, Any]) -> Panel:
    """What each prior makes of each threshold."""
    return Panel(
        "Baseline errors",
        "Kappa: the chance of the best guess before the release. The ball and the Gaussian have the mean and variance "
        f"of the {record['n_prior_samples']} images of the empirical prior, and know nothing else of images.",
        header=["Prior", "Success", "Kappa", "Caveat"],
        rows=[
            [
                prior["name"],
                "naming it" if prior["threshold"] is None else f"MSE up to {prior['threshold']:g}",
                _power(prior["log10_kappa"]),
                "see notes" if prior["caveat"] else "none",
            ]
            for prior in record["priors"]
        ],
    )


def sampled_panels(record: Mapping[str, Any]) -> list[Panel]:
    """Two ways to the bound for sampled batches; nothing where they were not asked for."""
    if not record["sampled"]:
        return []
    return [
        Panel(
            "Sampled batches",
            f"The tight bound of {record['steps']} steps on Poisson-sampled batches, by privacy-loss distributions, "
            "which never fall below it, and by simulation; on full batches also by the closed form.",
            header=[
                "Sampling rate",
                "Epsilon",
                "Noise multiplier",
                "Kappa",
                "Closed form",
                "Distributions",
                "Simulation",
            ],
            rows=[
                [
                    f"{row['rate']:g}",
                    f"{row['epsilon']:,g}",
                    f"{row['noise_multiplier']:.4g}",
                    f"{row['kappa']:g}",
                    ABSENT if row["closed"] is None else f"{row['closed']:.5g}",
                    f"{row['profile']:.5g}",
                    ABSENT if row["simulated"] is None else f"{row['simulated']:.5g} ± {row['standard_error']:.1g}",
                ]
                for row in record["sampled"]
            ],
        )
    ]


def equivalence_panels(record: Mapping[str, Any]) -> list[Panel]:
    """Theorem 5 at all budgets at which its chances can be told from 1."""
    rows = [cell["equivalence"] for cell in private_cells(record) if cell["equivalence"] is not None]
    if not rows:
        return []
    return [
        Panel(
            "From reconstruction back to privacy",
            "Theorem 5: two candidates with odds of e to the epsilon. The chance of the best attack follows from the "
            "training's delta (one record replaced by another), and delta from the chance.",
            header=["Epsilon", "Guess", "Best attack", "Delta", "Delta from the attack"],
            rows=[
                [f"{row['epsilon']:g}", *(f"{row[key]:.6g}" for key in ("guess", "gamma", "delta", "delta_from_gamma"))]
                for row in rows
            ],
        )
    ]


def private_cells(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Cells with noise, by epsilon."""
    return sorted((cell for cell in record["cells"] if cell["epsilon"] is not None), key=lambda cell: cell["epsilon"])


def named_cell(record: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """The cell of that name, if there is one."""
    return next((cell for cell in record["cells"] if cell["name"] == name), None)


def _power(log10: float) -> str:
    """A probability that may be below the least float.

    >>> _power(-1.0), _power(-36.3)
    ('0.1', '10^-36.3')
    """
    return f"{10**log10:.3g}" if log10 > -4 else f"10^{log10:.1f}"
