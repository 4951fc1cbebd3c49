"""The page of a study of training sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_recon.experiments.trainset import hypotheses
from lit_recon.experiments.trainset.plots import gallery, landscape_plots, quality_plots, start_plot
from lit_recon.experiments.trainset.results import DISTANCES, TABLE, ClaimRate, SeedMean, TrainsetGroup, TrainsetStudy
from lit_recon.experiments.trainset.score import BEST, GOOD, SAME_POOL, WRONG
from lit_recon.experiments.trainset.settings import PLAIN
from lit_recon.reporting.pages import Page, Panel, Picture, TableCell, knowledge_panel, notes_panels
from lit_recon.reporting.record import read_metrics
from lit_recon.reporting.run_folder import RunFolder
from lit_recon.reporting.wording import ABSENT, Grant, percent, short

#: Galleries that are shown.
_GALLERIES = 12
_COLUMNS = {
    "n_good": f"SSIM > {GOOD}",
    "best_ssim": f"SSIM, best {BEST}",
    "ssim": "SSIM",
    "ssim_stretched": "SSIM, min-max scaled",
    "ncc": "NCC",
    "rmse": "RMSE",
}


def write_page(folder: Path) -> Path:
    """Write the page and the plots of a finished study, from its files alone; raises as `TrainsetStudy.read`."""
    study = TrainsetStudy.read(folder)
    *_, finding = study.summary()
    page = Page(
        kind="Reconstruction of training sets",
        settings=study.settings,
        facts=read_metrics(RunFolder(folder).metrics),
        lead=finding,
        panels=[
            _reconstructions(study),
            _galleries(study),
            knowledge_panel(grants(study)),
            *_starts(study),
            *_landscape(study),
            *hypotheses.panels(study),
            *_quality(study),
            *_selection(study),
            _neighbours(study),
            *_membership(study),
            *_defenses(study),
            *_refused(study),
            *notes_panels(_notes(study)),
        ],
        files={
            TABLE: "the scores of every training image",
            "metrics.json": "all metrics",
            "cells/": "results and images of every cell",
            "models/": "the released models",
            "figures/": "the plots",
            "config.yaml": "the settings",
        },
    )
    return page.write(folder / "report.html")


def _reconstructions(study: TrainsetStudy) -> Panel:
    several = max(len(group.cells) for group in study.groups) > 1
    spread = " Means over training seeds ± half the length of their 95 % intervals." if several else ""
    certifies = any(group.certified() for group in study.groups)
    rows: list[Sequence[str | TableCell]] = [
        [
            group.title,
            short(group.share),
            f"{group.cells[0]['pool']:,}",
            *(
                TableCell(text, mark="ours") if group is study.best and name == "n_good" else text
                for name in _COLUMNS
                for text in [group.mean("scores", name).text()]
            ),
            *(_certified(group) if certifies else []),
        ]
        for group in study.groups
    ]
    paths = {group.attack: str(study.setting(f"attacks.{group.attack}.class_path")) for group in study.groups}
    classes = ", ".join(f"{name} is {path.rpartition('.')[2]}" for name, path in paths.items())
    first = study.groups[0]
    n_public, n_compared = first.cells[0]["n_public"], first.n_compared
    few = n_compared < first.cells[0]["pool"]
    fewer = f" There are {n_public:,} public images, fewer than candidates." if few else ""
    pools = {"mean image": 1, SAME_POOL: n_compared}
    rows += [
        [
            name,
            ABSENT,
            pool,
            *(first.mean("baselines", name, column).text() for column in _COLUMNS),
            *([ABSENT, ABSENT] if certifies else []),
        ]
        for name in first.cells[0]["baselines"]
        for pool in [f"{pools.get(name, n_public):,}"]
    ]
    return Panel(
        "Reconstructions",
        "Every training image is compared with the nearest candidate of the pool, and with answers that need no model: "
        "the mean of all public images, and the nearest of as many public images as candidates, or of all of them. "
        f"Pool: candidates of all restarts together. SSIM > {GOOD}: number of the {first.cells[0]['scores']['n']} "
        "training images. An attack shows more of them than is public only where it beats as many public images."
        f"{fewer} Attacks: {classes}.{spread}",
        header=[
            "Attack and start",
            "Truth in the start",
            "Pool",
            *_COLUMNS.values(),
            *(["Certified", "Certified, wrong"] if certifies else []),
        ],
        rows=rows,
        note="Nearest is by normalized cross-correlation (NCC) of deviations from the mean image, per channel with "
        "mean 0 and norm 1. SSIM and RMSE are of pixels in [0, 1], unscaled. For an exact reconstruction SSIM and NCC "
        "are 1 and RMSE is 0. Min-max scaled: every candidate is stretched to [0, 1] before, as in the literature, "
        "which hides errors of brightness and contrast. Values do not compare with those of the literature, "
        "whose SSIM has a window of 3 pixels, here of up to 11, and whose NCC is of images at half the size."
        + (_CERTIFIED if certifies else ""),
    )


_CERTIFIED = (
    " Certified: training images shown by a candidate that the attack itself, without the training images, takes for "
    f"exact. Wrong: such candidates that differ from every training image by an RMSE above {WRONG}. – : the attack "
    "certifies nothing."
)


def _certified(group: TrainsetGroup) -> list[str]:
    sure = group.certified()
    return [ABSENT, ABSENT] if sure is None else [sure["images"].text(), sure["wrong"].text()]


def _galleries(study: TrainsetStudy) -> Panel:
    chosen = sorted(study.groups, key=lambda group: -group.mean("scores", "best_ssim").value)[:_GALLERIES]
    parts = [
        Panel(
            group.title,
            f"Start: {group.cells[0]['start_described']}.",
            [Picture(gallery(study, group), f"Training images above their nearest candidates, {group.title}")],
        )
        for group in study.groups
        if group in chosen
    ]
    return Panel(
        "Images",
        "Training images of the first seed above their nearest candidates, in the order of their SSIM.",
        parts=parts,
    )


def grants(study: TrainsetStudy) -> list[Grant]:
    """What the attacker knew and did not know."""
    known, n_known = study.known, study.known.get("images", 0)
    return [
        Grant(True, "The released weights and the architecture, the number of training images and of each label."),
        Grant(True, "The mean of other, public images of the same data."),
        Grant(known["training"], "The training procedure: loss, steps and learning rate."),
        Grant(known["weight_decay"], "The weight decay of the training."),
        Grant(known["loss"], "The training loss of the released weights."),
        Grant(known["start"], "The weights at which the training began."),
        *([Grant(True, f"{n_known} of the training images; the others are to be found.")] if n_known else []),
        Grant(
            False,
            f"The {'other ' if n_known else ''}training images. They were used after the attack, to score it, and "
            "in the starts of which the tables state a share of the truth above 0.",
        ),
    ]


def _starts(study: TrainsetStudy) -> list[Panel]:
    rows = [
        [
            group.title,
            short(group.share),
            group.mean("scores_at_start", "ssim").text(),
            group.mean("scores", "ssim").text(),
            group.mean("scores_at_start", "rmse").text(),
            group.mean("scores", "rmse").text(),
        ]
        for group in study.where(lambda group: group.defense == PLAIN)
    ]
    if not rows:  # every attack applies under a defense only
        return []
    return [
        Panel(
            "Starts",
            "How much of a reconstruction is its start: the same scores of the start itself, clamped to [0, 1], and of "
            "what the attack made of it.",
            [Picture(start_plot(study), "SSIM by start and attack", "starts.svg")],
            header=["Attack and start", "Truth in the start", "SSIM, start", "SSIM, end", "RMSE, start", "RMSE, end"],
            rows=rows,
        )
    ]


def _landscape(study: TrainsetStudy) -> list[Panel]:
    drawn = landscape_plots(study)
    if drawn is None:
        return []
    return [
        Panel(
            "Over the share of the truth in the start",
            "What the attack minimizes, at the start and after the attack, and the quality of the candidates. Points: "
            "means over training seeds; bars: from the least to the largest of them.",
            [Picture(drawn, "Distances and SSIM over the share of the truth in the start", "landscape.svg")],
            note="The residuals of different attacks have units of their own, and at the start the multipliers of an "
            "attack that has some are random. Stationarity with the best multipliers is measured alike for all "
            "attacks: the distance of the released weights from the nearest combination of the candidates' gradients "
            "with multipliers of at least 0, over the norm of the weights.",
        )
    ]


def _quality(study: TrainsetStudy) -> list[Panel]:
    drawn = quality_plots(study)
    if drawn is None:
        return []
    names = [name for name in DISTANCES if any(group.before_and_after(name)[1] for group in study.groups)]
    rows = []
    for group in study.groups:
        cells = []
        for name in names:
            before, after = group.before_and_after(name)
            cells += [SeedMean.of(before).text(), SeedMean.of(after).text()] if before else [ABSENT, ABSENT]
        rows.append([group.title, *cells, group.mean("scores", "best_ssim").text()])
    header = [f"{DISTANCES[name]}, {place}" for name in names for place in ("start", "end")]
    return [
        Panel(
            "Distance and quality",
            "Whether candidates that explain the released weights better are better reconstructions. A point per "
            "restart.",
            [Picture(drawn, "SSIM against the distance to the released weights", "quality.svg")],
            header=["Attack and start", *(text[:1].upper() + text[1:] for text in header), f"SSIM, best {BEST}"],
            rows=rows,
            note="All distances are 0 for candidates that explain the weights fully; but stationarity is so for the "
            "training images only where the training has converged, without noise: with weight decay and at most two "
            "classes, or in the limit of zero loss. Parameter distances and stationarity are relative: at 1, nothing "
            "is explained. The parameter distance at the end is that of the last step, candidates of the best one.",
        )
    ]


def _selection(study: TrainsetStudy) -> list[Panel]:
    chosen = [(group, found) for group in study.groups if (found := group.selection()) is not None]
    if not chosen:
        return []
    several = [(group, group.selections()) for group, _ in chosen]
    return [
        Panel(
            "Selection",
            "What an attacker would present, who does not know the training images, and what can be chosen if they are "
            "known, as settings are chosen in the literature. The latter is no attack.",
            parts=[
                Panel(
                    "Of a restart",
                    f"Mean SSIM of the best {BEST} training images if one restart is chosen.",
                    header=["Attack and start", "By the attack's loss", "By the truth", "Difference", "All pooled"],
                    rows=[
                        [
                            group.title,
                            seen.text(),
                            truth.text(),
                            short(truth.value - seen.value),
                            group.mean("scores", "best_ssim").text(),
                        ]
                        for group, (seen, truth) in chosen
                    ],
                ),
                Panel(
                    "Of candidates",
                    f"Mean SSIM of {BEST} candidates of all restarts to their nearest training images: those of the "
                    "restart with the least loss, those that recur most often in other restarts, the means of the "
                    "clusters that occur in most restarts (0 without any), and those nearest to the truth.",
                    header=["Attack and start", *several[0][1], "Difference of the best to the truth"],
                    rows=[
                        [group.title, *(mean.text() for mean in own.values()), short(_missed(own))]
                        for group, own in several
                    ],
                ),
            ],
        )
    ]


def _missed(own: Mapping[str, SeedMean]) -> float:
    return own["truth"].value - max(mean.value for name, mean in own.items() if name != "truth")


def _interval(found: Any) -> str:
    return f"{percent(found['value'])} ({percent(found['low'])} to {percent(found['high'])})" if found else ABSENT


def _neighbours(study: TrainsetStudy) -> Panel:
    rows = []
    for group in study.groups:
        own = [group.mean("neighbours", side, name).text() for name in ("ncc", "ssim", "rmse") for side in _SIDES]
        shares = [_interval(group.cells[0]["neighbours"][name]) for name in ("closer_ncc", "closer_rmse")]
        rows.append([group.title, *own, *shares])
    header = [f"{name}, {side}" for name in ("NCC", "SSIM", "RMSE") for side in _SIDES.values()]
    return Panel(
        "Nearest neighbors",
        "Of every candidate, the nearest training image and the nearest of as many other images of the data that were "
        "not trained on. A candidate that shows nothing of the training set is as often closer to one as to the other.",
        header=["Attack and start", *header, "Closer to training, NCC", "Closer to training, RMSE"],
        rows=rows,
        note="Shares are of the first training seed, with 95 % intervals (Clopper and Pearson) that take candidates as "
        "independent. Candidates that an attack leaves at their start count, too.",
    )


_SIDES = {"members": "training", "others": "others"}


def _membership(study: TrainsetStudy) -> list[Panel]:
    tested = [(group, group.claims()) for group in study.groups if any(cell["claims"] for cell in group.cells)]
    if not tested:
        return []
    margin = study.setting("membership.margin")
    return [
        Panel(
            "Do reconstructions show members?",
            "The training images with the best reconstructions are left out of the training one by one, and the attack "
            f"is run again from the same start. An image counts as a member if its nearest candidate is then {margin} "
            "times farther, in RMSE. False positives: the same claim about images that were in neither training set, "
            "those with the best reconstructions among them.",
            header=["Attack and start", "True positives", "Tested", "False positives", "Tested"],
            rows=[
                [
                    group.title,
                    *(text for name in ("true_positives", "false_positives") for text in _claimed(found.get(name))),
                ]
                for group, found in tested
            ],
            note="Tests of one training share its model and candidates: rates are means over the trainings' own rates, "
            "± half the length of the 95 % interval over trainings where there are several.",
        )
    ]


def _claimed(rate: ClaimRate | None) -> tuple[str, str]:
    """A rate, and of how many tests."""
    if rate is None:
        return ABSENT, "0"
    half = "" if rate.mean.half is None else f" ± {percent(rate.mean.half)}"
    return percent(rate.mean.value) + half, str(rate.n)


def _defenses(study: TrainsetStudy) -> list[Panel]:
    defended = study.where(lambda group: group.defense != PLAIN)
    if not defended:
        return []
    rows = [
        [
            group.title,
            group.mean("model", "accuracy").text(),
            short(study.cost(group), 2),
            group.mean("model", "loss").text(),
            *(group.mean("scores", name).text() for name in ("n_good", "best_ssim", "rmse")),
        ]
        for group in sorted(study.groups, key=lambda group: (group.attack, group.start, group.share))
    ]
    return [
        Panel(
            "Defenses of training",
            "What changes of the training cost in accuracy on public images, and what they prevent.",
            header=["Attack, start and defense", "Accuracy", "Loss of accuracy", "Training loss", *_SHOWN.values()],
            rows=rows,
        )
    ]


_SHOWN = {name: _COLUMNS[name] for name in ("n_good", "best_ssim", "rmse")}


def _refused(study: TrainsetStudy) -> list[Panel]:
    items = [(name, reason) for name, reason in study.refused.items()]
    return [Panel("Not applicable", "Attacks whose assumptions do not hold.", items=items)] if items else []


def _notes(study: TrainsetStudy) -> list[str]:
    found = dict.fromkeys(
        f"{group.attack}: {note}." for group in study.groups for cell in group.cells for note in cell["notes"]
    )
    own: list[str] = [f"{note[:1].upper()}{note[1:]}" for note in found]
    if study.elsewhere:
        own.append("The model was trained elsewhere; whether these are its training images was not checked.")
    return own
