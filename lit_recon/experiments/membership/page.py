"""The page of informed membership inference: advantages, ROC curves, and the losses behind them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from lit_recon.errors import CorruptFileError
from lit_recon.experiments.released_attack.page import batch_grants, noise_grants
from lit_recon.reporting.images import image_grid
from lit_recon.reporting.pages import Page, Panel, Picture, knowledge_panel, notes_panels
from lit_recon.reporting.plots import COLOURS, STYLES, Plot, Series, draw
from lit_recon.reporting.provenance import find_setting
from lit_recon.reporting.record import RunRecord, read_arrays, read_table
from lit_recon.reporting.tables import facts
from lit_recon.reporting.wording import ABSENT, Grant, notes, percent, short

#: Candidates and reconstructions of all games; losses with and without single images.
GAMES, LOSSES = "games.safetensors", "losses.csv"
FILES = (GAMES, LOSSES)

KINDS = {"known": "known initial weights", "fresh": "unknown initial weights"}
ATTACKS = {
    "train_both": "train on both",
    "loss": "compare losses",
    "calibrated_loss": "compare calibrated losses",
    "reconstruction": "reconstruct",
}
#: Games in the picture.
_SHOWN = 12


def write_page(folder: Path) -> Path:
    """Write the page of a finished run of `reconn.py membership` into its folder; raises as `build_report` does."""
    record = RunRecord.read(folder)
    page = Page(
        kind="Membership report",
        settings=record.settings,
        facts=record.metrics,
        lead=verdict(record),
        panels=[
            *(build(record) for build in (_advantages, _histograms, _curves, _pictures)),
            knowledge_panel(grants(record)),
            *notes_panels(notes(record)),
        ],
        files={
            "metrics.json": "all metrics",
            "victims.csv": "every attack's score in every game",
            LOSSES: "the losses",
            "reconstructions.safetensors": "the images",
            GAMES: "the candidates",
            "config.yaml": "the settings",
        },
        costs=facts(record),
    )
    return page.write(record.folder.report)


def verdict(record: RunRecord) -> str:
    """One sentence: the advantages of all attacks with known and with unknown initial weights."""
    parts = []
    for kind, words in KINDS.items():
        values = (f"{record.number(f'{kind}.{name}.advantage') or 0:.2f} ({title})" for name, title in ATTACKS.items())
        parts.append(f"with {words} {', '.join(values)}")
    return f"Advantage over guessing, 1 for an attack that is always correct: {'; '.join(parts)}."


def grants(record: RunRecord) -> list[Grant]:
    """What the informed adversary knew and did not know."""
    shadows = f"{record.text('n_shadow')} other images, to train shadow models on"
    return [
        Grant(True, f"All training images but one, {record.text('n_fixed')} of them, with their labels."),
        Grant(True, "Two candidates for that one, of which one was drawn with probability 1/2."),
        Grant(True, "The released model: its architecture, its weights, and the optimizer that trained it."),
        Grant(True, f"{shadows}: to calibrate losses and to reconstruct."),
        Grant(True, "In half of the games, the initial weights that training began from."),
        Grant(False, "In the other half, the initial weights: every model, released or the adversary's, has its own."),
        *batch_grants(record),
        *noise_grants(record),
        Grant(False, "Which candidate was drawn. It was used only after the attack, to score it."),
    ]


def _advantages(record: RunRecord) -> Panel:
    found = (re.fullmatch(r"known\.loss\.tpr_at_([^_]+)", key) for key in record.metrics)
    rates = sorted(match[1] for match in found if match)
    keys = ["advantage", "auc", *(f"tpr_at_{rate}" for rate in rates)]
    n, members = len(record.victims), record.number("n_members") or 0
    return Panel(
        "Membership inference",
        f"{n} games for each kind of initial weights, with 95 % confidence intervals; {members:.0f} models were "
        f"trained on the second candidate, so that the smallest false positive rate above 0 is "
        f"{short(1 / max(n - members, 1), 2)}. Advantage: twice the share of right guesses minus 1. AUC: area under "
        "the ROC curve, 0.5 for guessing. TPR: true positive rate; FPR: false positive rate.",
        header=["Attack", "Advantage", "AUC", *(f"TPR at {percent(float(rate))} FPR" for rate in rates)],
        rows=[
            [f"{title}, {words}", *(_interval(record, f"{kind}.{name}.{key}") for key in keys)]
            for kind, words in KINDS.items()
            for name, title in ATTACKS.items()
        ],
    )


def _histograms(record: RunRecord) -> Panel:
    losses = _losses(record.folder.path / LOSSES)
    images = sorted({image for _, image, _ in losses})
    plots = []
    for kind, words in KINDS.items():
        own, others = (losses.get((kind, images[0], member), []) for member in (1, 0))
        title = f"{words}: {len(own)} model{'s' * (len(own) > 1)} with the image, {len(others)} without"
        samples = {"without the image": others, "with the image": own}
        plots.append(Plot(title, "loss on the image", "share of the models", samples=samples))
    alike = " With known initial weights all models trained on the image are equal, so there is only one."
    return Panel(
        "Losses with and without one image",
        "Losses on the second candidate of the first game: of models trained on it, and of models trained on another "
        "image in its place. The table shows the area under the ROC curve of a loss threshold for this and further "
        f"images.{'' if _differ(record) else alike}",
        [Picture(draw(plots, size=(5.0, 3.4)), "Losses of models with and without the image")],
        header=["Image", *(f"AUC, {words}" for words in KINDS.values())],
        rows=[
            [f"#{image}", *(_interval(record, f"{kind}.histogram_{image}.auc") for kind in KINDS)] for image in images
        ],
    )


def _differ(record: RunRecord) -> bool:
    """Whether trainings from the same weights on the same images end differently, each by a randomness of its own."""
    noise = any(find_setting(record.settings, f"descent.dp.{key}") for key in ("noise_multiplier", "target_epsilon"))
    own_order = find_setting(record.settings, "descent.order") == "unknown"
    return noise or (own_order and find_setting(record.settings, "descent.batch_size") is not None)


def _curves(record: RunRecord) -> Panel:
    from sklearn.metrics import roc_curve

    members = [row.scores["member"] for row in record.victims]
    floor, plots = 0.5 / len(members), []
    for kind, words in KINDS.items():
        series = [Series("guessing", [floor, 1], [floor, 1], "--")]
        for index, (name, title) in enumerate(ATTACKS.items()):
            rates = roc_curve(members, [row.scores[f"{kind}.{name}"] for row in record.victims])[:2]
            false, true = ([max(rate, floor) for rate in values] for values in rates)
            series.append(Series(title, false, true, ("-", *STYLES)[index], colour=COLOURS[index], width=1.8))
        axes: dict[str, Any] = {"x_scale": "log", "y_scale": "log", "x_range": (floor, 1.1), "y_range": (floor, 1.1)}
        plots.append(Plot(words, "false positive rate", "true positive rate", series=series, **axes))
    return Panel(
        "ROC curves",
        "Both axes are logarithmic: the left end shows whether an attack is ever certain. Rates of 0 are drawn at the "
        "lower limits.",
        [Picture(draw(plots, size=(4.6, 4.0), shared_y=True), "ROC curves of all attacks")],
    )


def _pictures(record: RunRecord) -> Panel:
    path = record.folder.path / GAMES
    found = read_arrays(path)
    try:
        rows = {"first": found["first"], "second": found["second"], "trained on": record.targets}
        rows |= {f"found, {kind} start": found[f"{kind}.reconstruction"] for kind in KINDS}
        grid = image_grid({name: images[:_SHOWN] for name, images in rows.items()}, columns=_SHOWN)
    except KeyError as error:
        raise CorruptFileError(
            f"{path} holds no {error} of a run's games: restore the file or repeat the run"
        ) from error
    implied, right = (record.number(f"known.reconstruction.implied_{key}") for key in ("share", "right"))
    certain = "" if right is None else f" Of these guesses {percent(right)} were right."
    return Panel(
        "Reconstruction implies membership inference",
        f"Both candidates of the first {min(_SHOWN, len(record.victims))} games, the one that was trained on, and its "
        "reconstruction from the released model; the attack guesses the candidate nearer to the reconstruction. Where "
        "the reconstruction error is below half the distance between the candidates, that guess must be right; with "
        f"known initial weights this holds for {percent(implied or 0)} of the games.{certain}",
        [Picture(grid, "Candidates and reconstructions")],
    )


def _losses(path: Path) -> dict[tuple[str, int, int], list[float]]:
    """Losses by kind of initial weights, image and membership."""
    found: dict[tuple[str, int, int], list[float]] = {}
    try:
        for row in read_table(path, ("initialization", "image", "member", "loss")):
            key = (row["initialization"], int(row["image"]), int(row["member"]))
            found.setdefault(key, []).append(float(row["loss"]))
    except ValueError as error:
        raise CorruptFileError(f"{path} must hold the losses of a run ({error}): repeat the run") from error
    if not found:
        raise CorruptFileError(f"{path} holds no losses: restore the file or repeat the run")
    return found


def _interval(record: RunRecord, key: str) -> str:
    value, low, high = (record.number(f"{key}{end}") for end in ("", "_low", "_high"))
    if value is None or low is None or high is None:
        return ABSENT
    return f"{value:.3f} ({low:.2f} to {high:.2f})"
