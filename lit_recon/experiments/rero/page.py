"""The page of a study of reconstruction robustness: error and accuracy, bounds and attacks, priors, checks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_recon.errors import CorruptFileError, MissingDataError
from lit_recon.experiments.rero.panels import (
    RECORD,
    attack_panel,
    bound_panel,
    equivalence_panels,
    error_panel,
    named_cell,
    picture_panel,
    prior_panel,
    private_cells,
    sampled_panels,
)
from lit_recon.io.files import write_text
from lit_recon.reporting.pages import render
from lit_recon.reporting.provenance import paper_of
from lit_recon.reporting.record import read_metrics
from lit_recon.reporting.run_folder import RunFolder
from lit_recon.reporting.settings import flatten, parse_settings


def write_page(folder: Path) -> Path:
    """Write the page of a finished run of `reconn.py rero` into its folder, from the files in it alone.

    Raises:
        MissingDataError: the folder holds no finished run.
        CorruptFileError: one of its files is malformed.
    """
    run = RunFolder(Path(folder))
    if not run.is_complete:
        raise MissingDataError(f"{run.path} holds no finished run: finish it with the command that began it")
    try:
        record = json.loads((run.path / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CorruptFileError(f"{run.path / RECORD} cannot be read ({error}): repeat the run") from error
    settings, metrics = parse_settings(run.config.read_text(encoding="utf-8"), run.config), read_metrics(run.metrics)
    page = render(
        "robustness.html.j2",
        name=str(settings.get("name") or run.path.resolve().name),
        paper=paper_of(settings),
        verdict=verdict(record),
        panels=[
            error_panel(record),
            picture_panel(run, record),
            attack_panel(record),
            bound_panel(record, [float(kappa) for kappa in _nested(settings, "prior", "kappas")]),
            prior_panel(record),
            *sampled_panels(record),
            *equivalence_panels(record),
        ],
        notes=notes(record),
        settings=flatten(settings),
        command=str(metrics.get("command") or ""),
    )
    write_text(run.report, page)
    return run.report


def verdict(record: Mapping[str, Any]) -> str:
    """What was found, in two or three sentences."""
    compared = [row for cell in record["cells"] for row in cell["comparisons"] if row["below"] is not None]
    above = [row for row in compared if not row["below"]]
    private, plain = private_cells(record), named_cell(record, "plain")
    told = [
        f"At epsilon {cell['epsilon']:,g} the attack's MSE is {cell['mse']:.4f} and released models classify "
        f"{cell['accuracy']:.0%}"
        for cell in (private[-1], private[0])
    ]
    first = f"{told[0]}; {told[1][0].lower()}{told[1][1:]}" if len(private) > 1 else told[0]
    mean = f"Guessing the mean image has {private[0]['baseline_mean_image_mse']:.4f}"
    without = f", the attack without noise {plain['mse']:.4f}" if plain else ""
    bound = (
        f"No attack succeeded more often than its bound allows, beyond chance, in {len(compared)} comparisons."
        if not above
        else f"{len(above)} of {len(compared)} success rates lie above their bound: see the table."
    )
    return f"{first}. {mean}{without}. {bound}"


def notes(record: Mapping[str, Any]) -> list[str]:
    """What a reader of the figures should know."""
    caveats = sorted({prior["caveat"] for prior in record["priors"]} - {""})
    unknown, plain = named_cell(record, "unknown_initialization"), named_cell(record, "plain")
    found = [f"Caveat of a baseline error: {caveat}." for caveat in caveats]
    if unknown and plain:
        found.append(
            f"Without noise and with known initial weights the attack's MSE is {plain['mse']:.4f}; where every model "
            f"has initial weights of its own, unknown to the attacker, it is {unknown['mse']:.4f}, and the mean "
            f"image's is {unknown['baseline_mean_image_mse']:.4f}."
        )
    return [
        *found,
        (
            "Epsilon is that of the whole training, exact for full batches. The bounds compare the weights with the "
            "unknown image to those without it, whatever relation epsilon is stated for."
        ),
        (
            "The attacks see the final weights only; the bounds hold for one who sees every step, and are reached by "
            "such a one. An attack far below its bound may be a weak attack."
        ),
        (
            "Success rates carry a 95 % interval (Clopper and Pearson); a rate counts as above its bound where the "
            "whole interval is."
        ),
        f"Accuracy: mean over at most 20 released models, on {record['n_test_images']} images that they never saw.",
    ]


def _nested(settings: Mapping[str, object], group: str, key: str) -> Sequence[Any]:
    inner = settings.get(group)
    found = inner.get(key) if isinstance(inner, Mapping) else None
    return found if isinstance(found, list) else []
