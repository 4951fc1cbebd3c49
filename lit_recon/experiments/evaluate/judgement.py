"""Comparison of defenses: the strongest attack on each, at equal cost.

The leakage of a defense at a strength is the mean metric (RMSE by default) of its strongest attack, which the evaluator
selects by the target images. Its cost is the loss of accuracy against training without a defense. Attacks with their
own networks are not compared.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from lit_recon.experiments.evaluate.results import CellResult, Evaluation, LeakageMetric


@dataclass(frozen=True)
class Level:
    """A defense at one strength and one batch size.

    Attributes:
        strongest: the attack with the best reconstructions, if any.
        complete: every attack that is applicable has the metric.
        none_applies: there are attacks, and none is applicable, while one is without a defense.
        guess: the metric of the mean public image, which is what is left where none is; None where it is not known.
    """

    evaluation: Evaluation
    defense: str
    strength: float | None
    strongest: CellResult | None
    complete: bool = True
    none_applies: bool = False
    guess: float | None = None

    @property
    def title(self) -> str:
        return self.evaluation.title(self.defense, self.strength)

    @property
    def attack(self) -> str:
        """The strongest attack in words."""
        return self.evaluation.attack_title(self.strongest) if self.strongest else "none"

    @property
    def metric(self) -> LeakageMetric:
        return self.evaluation.metric

    @property
    def accuracy(self) -> float | None:
        """Test accuracy of the training under the defense; None where it was not measured."""
        return self.evaluation.utility(self.defense, self.strength, "accuracy")

    @property
    def cost(self) -> float | None:
        """Mean loss of test accuracy against no defense, in [0, 1]; None where it was not measured."""
        losses = self.evaluation.losses(self.defense, self.strength)
        return statistics.mean(losses) if losses else None

    @property
    def cost_error(self) -> float | None:
        """Standard error of `cost`, from trainings with several seeds; None where it is not known."""
        losses = self.evaluation.losses(self.defense, self.strength)
        return statistics.stdev(losses) / math.sqrt(len(losses)) if len(losses) > 1 else None

    @property
    def value(self) -> float | None:
        return self.strongest.number(self.metric.key) if self.strongest else self.guess

    @property
    def distance(self) -> float | None:
        """The metric of the strongest attack, with the sign that makes larger values better protection."""
        return None if self.value is None else self.metric.distance(self.value)

    @property
    def standard_error(self) -> float | None:
        """Standard error of `value`, with batches as clusters; None where it is not known, as from a single batch."""
        return self.strongest.error(self.metric.key) if self.strongest else None

    @property
    def baseline(self) -> float | None:
        """Mean metric of the nearest public image over the same images; None for metrics without this baseline.

        None also where it is infinite: a single target image that is public decides nothing about the others.
        """
        if self.strongest is None or self.metric.baseline is None:
            return None
        value = self.strongest.number(self.metric.baseline)
        return value if value is not None and math.isfinite(value) else None

    @property
    def stops(self) -> bool | None:
        """Whether no attack is applicable or the strongest is worse than the nearest public image; None: not known."""
        if self.none_applies and self.metric.baseline:
            return True
        if self.distance is None or self.baseline is None:
            return None
        worse = self.distance > self.metric.distance(self.baseline)
        return None if worse and not self.complete else worse


def strongest(cells: Sequence[CellResult], metric: LeakageMetric) -> CellResult | None:
    """The attack with the best reconstructions; None where none has the metric."""
    scored = [(metric.distance(value), cell) for cell in cells if (value := cell.number(metric.key)) is not None]
    return min(scored, key=lambda pair: pair[0])[1] if scored else None


def levels(evaluation: Evaluation, batch_size: int, barred: Collection[str] = ()) -> list[Level]:
    """No defense, then every defense at every strength, for one batch size; attacks `barred` are left out."""
    metric = evaluation.metric
    same = evaluation.compared(batch_size)
    rivals = [cell for cell in same if cell.attack not in barred]
    guesses = [value for cell in same if (value := cell.number(f"baseline_mean_image_{metric.key}")) is not None]
    found = []
    for defense, strength in evaluation.levels:
        cells = [cell for cell in rivals if (cell.defense, cell.strength) == (defense, strength)]
        complete = all(cell.number(metric.key) is not None for cell in cells if cell.applicable)
        futile = bool(cells) and not any(cell.applicable for cell in cells)
        guess = guesses[0] if futile and guesses else None
        found.append(Level(evaluation, defense, strength, strongest(cells, metric), complete, futile, guess))
    if found and found[0].strength is None and found[0].none_applies:  # that no attack works is no merit of a defense
        return [replace(level, none_applies=False, guess=None) for level in found]
    return found


def pareto_front(points: Sequence[Level]) -> list[Level]:
    """Levels that no other level beats in both cost and protection, by increasing cost."""
    known = [
        (level.cost, level.distance, level) for level in points if level.cost is not None and level.distance is not None
    ]
    front: list[Level] = []
    for _, distance, level in sorted(known, key=lambda one: (one[0], -one[1])):
        if not front or distance > (front[-1].distance or 0.0):
            front.append(level)
    return front


def verdicts(evaluation: Evaluation) -> list[tuple[str, list[str]]]:
    """Title of every defense, with a sentence per batch size, and others where fewer attackers change it."""
    found: list[tuple[str, list[str]]] = []
    for name, title in evaluation.defenses.items():
        sentences = []
        for size in evaluation.batch_sizes:
            said = ""
            for side in evaluation.sides:
                verdict = said if side.without else _verdict(name, levels(evaluation, size, side.barred))
                if verdict != said:
                    whose = f", {side.servers} only" if side.barred else ""
                    sentences.append(f"Batch size {size}{whose}: {verdict}")
                said = verdict
        found.append((title, sentences))
    return found


def _verdict(name: str, points: Sequence[Level]) -> str:
    every = [level for level in points if level.defense == name]
    own = [level for level in every if level.distance is not None]
    beyond = next((level for level in every if level.none_applies), None)
    if beyond is not None and beyond not in own:  # no metric of the mean public image
        return f"behind {beyond.title} no attack is applicable{_cost(beyond)}."
    if not own:
        return "not known, as no attack on it has results."
    plain = next((level for level in points if level.strength is None), None)
    best = max(own, key=lambda level: level.distance or 0.0)
    measure = best.metric.measure
    if best.metric.of_features:
        without = "" if plain is None or plain.value is None else f" against {_value(plain)} without a defense"
        return (
            f"the strongest protection is {best.title}, where {best.attack} reaches a {measure.name.lower()} of "
            f"{_value(best)}{without}{_cost(best)}."
        )
    judged = [level for level in own if level.stops is not None]
    if not judged:
        if any(level.baseline is not None for level in own):
            return "not known, as attacks that are applicable have no results."
        return f"not known, as the nearest public image has no {measure.name}."
    if plain is not None and plain.stops:
        return (
            "not known: even without a defense no attack of the grid is better than the nearest public image "
            f"({_against(plain)})."
        )
    stopping = next((level for level in judged if level.stops), None)
    if stopping is None and best not in judged:
        return (
            f"not known, as attacks that are applicable have no results behind {best.title}; no strength with all "
            "results stops the strongest attack."
        )
    if stopping is None:
        return (
            f"no strength of the grid stops the strongest attack. The strongest protection is {best.title}, where "
            f"{best.attack} is still better than the nearest public image ({_against(best)}){_cost(best)}."
        )
    weaker = [level.title for level in judged[judged.index(stopping) + 1 :] if not level.stops]
    odd = f"; some larger strengths do not ({', '.join(weaker)})" if weaker else ""
    if stopping.none_applies:
        return f"behind {stopping.title} no attack is applicable{_cost(stopping)}{odd}."
    error, margin = stopping.standard_error, abs((stopping.value or 0.0) - (stopping.baseline or 0.0))
    close = ", a margin within one standard error" if error is not None and margin < error else ""
    return (
        f"{stopping.title} stops the strongest attack, {stopping.attack} ({_against(stopping)}{close})"
        f"{_cost(stopping)}{odd}."
    )


def _value(level: Level) -> str:
    value, error = level.metric.format(level.value), level.standard_error
    if level.value is not None and math.isinf(level.value):
        return f"{value} (infinite for at least one image)"
    if error is not None:
        return f"{value} ± {level.metric.format(error)}"
    alone = level.strongest is not None and level.strongest.has_one_batch
    return f"{value} ± unknown{' from one batch' if alone else ''}"


def _against(level: Level) -> str:
    baseline = level.metric.format(level.baseline)
    return f"{level.metric.measure.name} {_value(level)} against {baseline} of the nearest public image"


def _cost(level: Level) -> str:
    if level.cost is None:
        return "; its cost was not measured"
    points = round(100 * level.cost, 1)
    if points <= 0:
        return ", and costs no accuracy" + (f" ({-points:.1f} percentage points gained)" if points else "")
    return f", and costs {points:.1f} percentage points of accuracy"
