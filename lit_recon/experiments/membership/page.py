"""The page of informed membership games: who won, at which rates, and the losses behind it."""

from __future__ import annotations

import csv
from pathlib import Path

from safetensors import SafetensorError
from safetensors.numpy import load_file

from lit_recon.errors import CorruptFileError
from lit_recon.experiments.released_attack.page import batch_grants
from lit_recon.io.files import write_text
from lit_recon.reporting.pages import Panel, picture, render
from lit_recon.reporting.plots import image_grid, loss_histogram, roc_curves
from lit_recon.reporting.provenance import paper_of
from lit_recon.reporting.record import RunRecord
from lit_recon.reporting.settings import flatten
from lit_recon.reporting.tables import facts
from lit_recon.reporting.wording import ABSENT, Grant, notes

#: Candidates and reconstructions of all games; losses with and without single images.
GAMES, LOSSES = "games.safetensors", "losses.csv"
FILES = (GAMES, LOSSES)

_KINDS = {"known": "known initial weights", "fresh": "unknown initial weights"}
_ATTACKS = {
    "train_both": "train on both",
    "loss": "compare losses",
    "calibrated_loss": "compare losses with the usual",
    "reconstruction": "reconstruct",
}
#: Games in the picture.
_SHOWN = 12


def write_page(folder: Path) -> Path:
    """Write the page of a finished run of `reconn.py membership` into its folder, from the files in it alone.

    Raises:
        MissingDataError: the folder holds no finished run.
        CorruptFileError: one of its files is malformed.
    """
    record = RunRecord.read(Path(folder))
    page = render(
        "membership.html.j2",
        name=str(record.settings.get("name") or record.folder.path.resolve().name),
        paper=paper_of(record.settings),
        verdict=verdict(record),
        panels=[_figures(record), _histograms(record), _curves(record), _pictures(record)],
        knowledge=grants(record),
        notes=notes(record),
        settings=flatten(record.settings),
        facts=facts(record),
        command=record.text("command"),
        created=record.text("created"),
        version=record.text("version_lit_recon"),
    )
    write_text(record.folder.report, page)
    return record.folder.report


def verdict(record: RunRecord) -> str:
    """One sentence: the advantages of all attacks with known and with unknown initial weights."""
    parts = []
    for kind, words in _KINDS.items():
        told = [f"{record.number(f'{kind}.{name}.advantage') or 0:.2f} ({title})" for name, title in _ATTACKS.items()]
        parts.append(f"with {words} {', '.join(told)}")
    return f"Advantage over guessing, where 1 is always right: {'; '.join(parts)}."


def grants(record: RunRecord) -> list[Grant]:
    """What the informed adversary knew, then what not."""
    return [
        Grant(True, f"All training images but one, {record.text('n_fixed')} of them, with their labels."),
        Grant(True, "Two candidates for that one, and that a fair coin chose between them."),
        Grant(True, "The released model: its architecture, its weights, and the optimizer that trained it."),
        Grant(
            True,
            f"{record.text('n_shadow')} other images, to train shadow models on: for usual losses and to reconstruct.",
        ),
        Grant(True, "In half of the games, the initial weights that training began from."),
        Grant(False, "In the other half, these: every model, released or the adversary's, has its own."),
        *batch_grants(record),
        Grant(False, "The coin. It served only after the attack, to score it."),
    ]


def _figures(record: RunRecord) -> Panel:
    rates = sorted(
        key.removeprefix("known.loss.tpr_at_")
        for key in record.metrics
        if key.startswith("known.loss.tpr_at_") and not key.endswith(("_low", "_high"))
    )
    keys = ["advantage", "auc", *(f"tpr_at_{rate}" for rate in rates)]
    n, members = len(record.victims), record.number("n_members") or 0
    return Panel(
        "Who was a member",
        f"{n} games for each kind of initial weights, with 95 % confidence intervals; {members:.0f} models were "
        f"trained on the second candidate, so that the least false positive rate above 0 is "
        f"{1 / max(n - members, 1):.2g}. Advantage: twice the share of right guesses less one. AUC: 0.5 is chance.",
        header=["Attack", "Advantage", "AUC", *(f"Found at {float(rate):.0%} false alarms" for rate in rates)],
        rows=[
            [f"{title}, {words}", *(_interval(record, f"{kind}.{name}.{key}") for key in keys)]
            for kind, words in _KINDS.items()
            for name, title in _ATTACKS.items()
        ],
    )


def _histograms(record: RunRecord) -> Panel:
    losses = _losses(record.folder.path / LOSSES)
    images = sorted({image for _, image, _ in losses})
    drawn = {
        words: (losses.get((kind, images[0], 1), []), losses.get((kind, images[0], 0), []))
        for kind, words in _KINDS.items()
    }
    return Panel(
        "Losses with and without one image",
        "Losses on the second candidate of the first game: of models that were trained on it, and of models that were "
        "trained on another image in its place. The table has the area under the ROC curve of a loss threshold for "
        "this and further images; with known initial weights there is one model with the image, since all are equal.",
        pictures=[(picture(loss_histogram(drawn), "svg"), "Losses of models with and without the image")],
        header=["Image", *(f"AUC, {words}" for words in _KINDS.values())],
        rows=[
            [f"#{image}", *(_interval(record, f"{kind}.histogram_{image}.auc") for kind in _KINDS)] for image in images
        ],
    )


def _curves(record: RunRecord) -> Panel:
    from sklearn.metrics import roc_curve

    members = [row.scores["member"] for row in record.victims]
    curves = {
        words: {
            title: roc_curve(members, [row.scores[f"{kind}.{name}"] for row in record.victims])[:2]
            for name, title in _ATTACKS.items()
        }
        for kind, words in _KINDS.items()
    }
    drawn = roc_curves(curves, floor=0.5 / len(members))
    return Panel(
        "Finds against false alarms",
        "Logarithmic: the left end shows whether an attack is ever sure. Rates of 0 are drawn at the lower ends.",
        pictures=[(picture(drawn, "svg"), "ROC curves of all attacks")],
    )


def _pictures(record: RunRecord) -> Panel:
    path = record.folder.path / GAMES
    try:
        found = load_file(path)
        rows = {"first": found["first"], "second": found["second"], "trained on": record.targets}
        rows |= {f"found, {kind} start": found[f"{kind}.reconstruction"] for kind in _KINDS}
        grid = image_grid({name: images[:_SHOWN] for name, images in rows.items()}, columns=_SHOWN)
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise CorruptFileError(
            f"{path} must hold the images of a run's games ({error}): restore the file or repeat the run"
        ) from error
    implied, right = (record.number(f"known.reconstruction.implied_{key}") for key in ("share", "right"))
    sure = "" if right is None else f" Of these guesses {right:.0%} were right."
    return Panel(
        "Whoever reconstructs infers membership",
        f"Both candidates of the first {min(_SHOWN, len(record.victims))} games, the one that was trained on, and what "
        "a reconstruction attack makes of the released model; it guesses the candidate that its image is nearer to. "
        "Where its error is below half the distance of the candidates that guess must be right; with known initial "
        f"weights this holds for {implied or 0:.0%} of the games.{sure}",
        pictures=[(picture(grid, "png"), "Candidates and reconstructions")],
    )


def _losses(path: Path) -> dict[tuple[str, int, int], list[float]]:
    """Losses by kind of initial weights, image and membership."""
    found: dict[tuple[str, int, int], list[float]] = {}
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                key = (row["initialization"], int(row["image"]), int(row["member"]))
                found.setdefault(key, []).append(float(row["loss"]))
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise CorruptFileError(f"{path} must hold the losses of a run ({error}): repeat the run") from error
    if not found:
        raise CorruptFileError(f"{path} holds no losses: restore the file or repeat the run")
    return found


def _interval(record: RunRecord, key: str) -> str:
    value, low, high = (record.number(f"{key}{end}") for end in ("", "_low", "_high"))
    if value is None or low is None or high is None:
        return ABSENT
    return f"{value:.3f} ({low:.2f} to {high:.2f})"
