"""The findings of [Runkel2024] as hypotheses, each with a comparison over the training seeds of a study."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from scipy.stats import spearmanr

from lit_recon.experiments.trainset.results import SeedMean, TrainsetGroup, TrainsetStudy, ends
from lit_recon.experiments.trainset.score import SAME_POOL
from lit_recon.experiments.trainset.settings import PLAIN
from lit_recon.reporting.pages import Panel
from lit_recon.reporting.wording import short
from lit_recon.reporting.writing import csv_text

#: File of the answers in a study's folder.
HYPOTHESES = "hypotheses.csv"
#: A fall of the objective is done where this share of it is.
_DONE = 0.9
#: Weights, or their change, count as explained if at most this share of their norm is not.
EXPLAINED = 0.1
#: The comparison that says so.
UNEXPLAINED = (
    f"{EXPLAINED:g} minus the share of the weights' norm, or of that of their change, left unexplained, from noise"
)
#: Share of the truth at which the slopes of landscapes are compared.
_NEAR = 0.75


@dataclass(frozen=True)
class Answer:
    """One hypothesis about one attack: it holds where the difference is above 0.

    Attributes:
        hypothesis: the finding of the paper.
        attack: name of the attack.
        compared: what the difference is.
        difference: mean over training seeds, with its interval.
        missing: why it answers nothing; empty where it does.
    """

    hypothesis: str
    attack: str
    compared: str
    difference: SeedMean
    missing: str = ""

    @property
    def verdict(self) -> str:
        """`agrees` or `disagrees` where the whole interval is on one side of 0, `undecided`, or what is missing."""
        if self.missing:
            return f"not judged: {self.missing}"
        value, half = self.difference.value, self.difference.half
        if half is None or math.isnan(value) or abs(value) <= half:
            return "undecided"
        return "agrees" if value > 0 else "disagrees"


def answers(study: TrainsetStudy) -> list[Answer]:
    """The hypotheses that a study has the starts for; none of one without several of them."""
    groups = {(group.attack, group.start, group.share): group for group in study.groups if group.defense == PLAIN}
    kinds = {name: str(one["class_path"]).rpartition(".")[2] for name, one in study.settings["starts"].items()}
    found: list[Answer] = []
    for attack in dict.fromkeys(group.attack for group in study.groups):
        own = {start: groups[attack, start, 0.0] for start in kinds if (attack, start, 0.0) in groups}
        noise = next((group for start, group in own.items() if kinds[start] == "NoiseStart"), None)
        other = next((group for start, group in own.items() if kinds[start] == "OtherPartitionStart"), None)
        if noise is not None and other is not None:
            found += _real_starts(attack, noise, other)
        if noise is not None:
            found += _non_members(attack, noise)
        found += _uncertainty(attack, [group for group in own.values() if group.share == 0])
    for (attack, start), along in study.landscape().items():
        if kinds.get(start) == "MixtureStart" and study.settings["starts"][start]["init_args"].get("rest") == "noise":
            found += _landscape(attack, along)
    return found


def _seeds(group: TrainsetGroup, value: Any) -> list[float]:
    """The mean of a function of a restart for every training seed."""
    return [fmean(value(one) for one in cell["restarts"]) for cell in group.cells]


def _difference(first: Sequence[float], second: Sequence[float]) -> SeedMean:
    return SeedMean.of([a - b for a, b in zip(first, second, strict=True)])


def _share_of_steps(restart: Mapping[str, Any]) -> float:
    """The share of the steps after which most of the fall of the loss is done."""
    losses = restart["curve"]["loss"]
    limit = losses[0] - _DONE * (losses[0] - min(losses))
    return next(place for place, loss in enumerate(losses) if loss <= limit) / max(1, len(losses) - 1)


def _real_starts(attack: str, noise: TrainsetGroup, other: TrainsetGroup) -> list[Answer]:
    said = "Starts that look real converge fast and stay what they were."
    steps = _difference(_seeds(noise, _share_of_steps), _seeds(other, _share_of_steps))
    stay = SeedMean.of(_seeds(other, lambda one: one["to_member"] - one["moved"]))
    return [
        Answer(said, attack, "share of the steps for 90 % of the fall: from noise minus from other images", steps),
        Answer(said, attack, "RMSE to the nearest training image minus to its own start, from other images", stay),
    ]


def _non_members(attack: str, noise: TrainsetGroup) -> list[Answer]:
    said = "Random starts can give images that explain the weights and are no training images."
    left = [[share for one in cell["restarts"] if (share := _unexplained(one)) is not None] for cell in noise.cells]
    rows = []
    if all(left):
        rows.append(Answer(said, attack, UNEXPLAINED, SeedMean.of([EXPLAINED - fmean(own) for own in left])))
    public = [float(cell["baselines"][SAME_POOL]["best_ssim"]) for cell in noise.cells]
    found = [float(cell["scores"]["best_ssim"]) for cell in noise.cells]
    compared = "SSIM of the ten best: nearest of as many public images minus reconstructions from noise"
    return [*rows, Answer(said, attack, compared, _difference(public, found))]


def _unexplained(restart: Mapping[str, Any]) -> float | None:
    """The relative norm that is left at the end: the distance of bilevel attacks, or the root of others' residual."""
    if (distance := ends(restart, "distance")) is not None:
        return distance[1]
    return None if (residual := ends(restart, "residual")) is None else math.sqrt(residual[1])


def _uncertainty(attack: str, groups: Sequence[TrainsetGroup]) -> list[Answer]:
    said = "The uncertainty protects: what an attacker sees does not tell good reconstructions from bad ones."
    cells = zip(*(group.cells for group in groups), strict=True)
    values = []
    for same_seed in cells:
        restarts = [one for cell in same_seed for one in cell["restarts"]]
        losses, quality = ([one["loss"] for one in restarts], [one["scores"]["best_ssim"] for one in restarts])
        if len(restarts) < 4 or len(set(losses)) < 2 or len(set(quality)) < 2:
            return []
        values.append(0.5 - abs(float(spearmanr(losses, quality).statistic)))
    compared = "0.5 minus the size of the rank correlation of loss and SSIM over restarts and starts without truth"
    return [Answer(said, attack, compared, SeedMean.of(values))] if values else []


def _landscape(attack: str, along: Sequence[TrainsetGroup]) -> list[Answer]:
    said = "The landscape of the conditions of stationarity is smoother than that of bilevel optimization."
    near = [group for group in along if group.share == _NEAR]
    far = along[0]
    if not near or any("distance" not in one["curve"] for cell in far.cells for one in cell["restarts"]):
        return []
    slopes = []
    for quantity in ("distance", "stationarity"):
        at_near, at_far = (group.before_and_after(quantity)[0] for group in (near[0], far))
        if not at_near or not at_far:
            return []
        slopes.append([a / b for a, b in zip(at_near, at_far, strict=True)])
    compared = (
        f"value with {_NEAR:.0%} of the truth, as a share of that with {far.share:.0%}: parameter distance minus "
        "stationarity with the best multipliers"
    )
    truth = [value for group in along if group.share == 1 for value in group.before_and_after("stationarity")[0]]
    return [Answer(said, attack, compared, _difference(*slopes), not_stationary(max(truth, default=None)))]


def not_stationary(at_truth: float | None) -> str:
    """What the landscape of stationarity lacks, whose value is this at the training images; empty if nothing."""
    if at_truth is None:
        return "stationarity at the training images is not known, add the share 1 to the start"
    moving = f"the weights are not stationary, {short(at_truth, 2)} at the training images"
    return "" if at_truth <= EXPLAINED else moving


def table(found: Sequence[Answer]) -> str:
    """The answers as CSV; half the length of the interval is empty for one training seed."""
    rows = [[a.hypothesis, a.attack, a.compared, a.difference.value, a.difference.half, a.verdict] for a in found]
    return csv_text(["hypothesis", "attack", "compared", "difference", "half", "answer"], rows)


def panels(study: TrainsetStudy) -> list[Panel]:
    """The answers; nothing for a study without the starts that they need."""
    found = answers(study)
    if all(answer.difference.half is None for answer in found):
        return []  # one training seed has no interval, and answers nothing
    return [
        Panel(
            "Hypotheses",
            "Findings of Runkel et al. 2024, each as a difference that is above 0 where the finding holds. The answer "
            "is left open where the 95 % interval over training seeds contains 0.",
            header=["Attack", "Hypothesis", "Difference", "Value", "Answer"],
            rows=[[a.attack, a.hypothesis, a.compared, a.difference.text(), a.verdict] for a in found],
        )
    ]
