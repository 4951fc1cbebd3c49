"""The judgement of defenses: the strongest attack on each, at equal loss of accuracy.

The leakage of a defense at a strength is the mean figure (RMSE, unless the grid says otherwise) of the attack that
comes closest. Its price is what the accuracy loses against training without a defense. Whoever picks the strongest
attack afterwards uses the truth; that is the evaluator's right, no attack does.

Attacks on a network of their own do not compete: price, and all others, are about the grid's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from lit_recon.reporting.evaluation.figure import Figure
from lit_recon.reporting.evaluation.results import CellResult, Evaluation

#: Name of the cells without a defense.
NO_DEFENSE = "none"


@dataclass(frozen=True)
class Level:
    """A defense at one strength and one batch size.

    Attributes:
        defense, strength: no strength without a defense.
        batch_size: images per client.
        title: for readers.
        strongest: the attack that comes closest; None where none has figures.
        price: loss of test accuracy against no defense, as a fraction; None where it was not measured.
        accuracy, train_loss: the utility itself.
    """

    defense: str
    strength: float | None
    batch_size: int
    title: str
    strongest: CellResult | None
    price: float | None
    accuracy: float | None
    train_loss: float | None
    figure: Figure = field(default_factory=Figure)

    @property
    def value(self) -> float | None:
        """The figure of the strongest attack."""
        return self.strongest.number(self.figure.key) if self.strongest else None

    @property
    def distance(self) -> float | None:
        """The same, such that more protects better."""
        return None if self.value is None else self.figure.distance(self.value)

    @property
    def standard_error(self) -> float | None:
        """Of `value`, over the images."""
        if self.strongest is None:
            return None
        spread, n = self.strongest.number(f"{self.figure.key}_std"), self.strongest.number("n")
        return None if spread is None or not n else spread / math.sqrt(n)

    @property
    def baseline(self) -> float | None:
        """The figure of the nearest public image, on average over the same images; None: there is no such guess."""
        if self.strongest is None or self.figure.baseline is None:
            return None
        return self.strongest.number(self.figure.baseline)

    @property
    def stops(self) -> bool | None:
        """Whether even the strongest attack comes no closer than the nearest public image; None: not known."""
        if self.distance is None or self.baseline is None:
            return None
        return self.distance > self.figure.distance(self.baseline)


def strongest(cells: Sequence[CellResult], figure: Figure) -> CellResult | None:
    """The cell that comes closest; None where none has the figure."""
    scored = [(figure.distance(value), cell) for cell in cells if (value := cell.number(figure.key)) is not None]
    return min(scored, key=lambda pair: pair[0])[1] if scored else None


def levels(evaluation: Evaluation, batch_size: int, honest: bool = False) -> list[Level]:
    """Every defense at every strength for one batch size, in the order of the grid; no defense comes first.

    Args:
        evaluation: all cells.
        batch_size: images per client.
        honest: against honest-but-curious servers alone.
    """
    barred = {*evaluation.networks, *(evaluation.malicious if honest else ())}
    plain = evaluation.training(*evaluation.levels[0])
    reference = plain.number("accuracy") if plain else None
    found = []
    for defense, strength in evaluation.levels:
        training = evaluation.training(defense, strength)
        accuracy = training.number("accuracy") if training else None
        cells = [
            cell
            for cell in evaluation.attacked
            if (cell.defense, cell.strength, cell.batch_size) == (defense, strength, batch_size)
            and cell.attack not in barred
        ]
        found.append(
            Level(
                defense,
                strength,
                batch_size,
                evaluation.title(defense, strength),
                strongest(cells, evaluation.figure),
                None if accuracy is None or reference is None else reference - accuracy,
                accuracy,
                training.number("final_train_loss") if training else None,
                evaluation.figure,
            )
        )
    return found


def pareto_front(points: Sequence[Level]) -> list[Level]:
    """Levels that no other beats in accuracy and in distance of the strongest attack at once, by falling accuracy."""
    known = [
        (level.accuracy, level.distance, level)
        for level in points
        if level.accuracy is not None and level.distance is not None
    ]
    front: list[Level] = []
    best = -math.inf
    for _, distance, level in sorted(known, key=lambda one: (-one[0], -one[1])):
        if distance > best:
            front.append(level)
            best = distance
    return front


def best_within(points: Sequence[Level], budget: float) -> dict[str, Level]:
    """By defense, the strength that protects best among those that lose at most `budget` of the accuracy.

    No defense stands under its own name: what protects less than it is not worth its price.
    """
    best: dict[str, tuple[float, Level]] = {}
    for level in points:
        if level.price is None or level.distance is None or level.price > budget + 1e-12:
            continue
        if level.defense not in best or level.distance > best[level.defense][0]:
            best[level.defense] = (level.distance, level)
    return {defense: level for defense, (_, level) in best.items()}
