"""The judgement of defenses: the strongest attack on each, at equal loss of accuracy.

The leakage of a defense at a strength is the mean RMSE of the attack that comes closest; more is better. Its price is
what the accuracy loses against training without a defense. Whoever picks the strongest attack afterwards uses the
truth; that is the evaluator's right, no attack does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lit_recon.reporting.evaluation.results import CellResult, Evaluation

#: Public images are known to everybody: an attack that comes no closer than the nearest of them gave nothing away.
BASELINE = "baseline_nearest_public_rmse"
#: Name of the cells without a defense.
NO_DEFENSE = "none"


@dataclass(frozen=True)
class Level:
    """A defense at one strength and one batch size.

    Attributes:
        defense, strength: no strength without a defense.
        batch_size: images per client.
        title: for readers.
        strongest: the attack with the least mean RMSE; None where none has figures.
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

    @property
    def rmse(self) -> float | None:
        """Of the strongest attack."""
        return self.strongest.rmse if self.strongest else None

    @property
    def standard_error(self) -> float | None:
        """Of `rmse`, over the images."""
        if self.strongest is None:
            return None
        spread, n = self.strongest.number("rmse_std"), self.strongest.number("n")
        return None if spread is None or not n else spread / math.sqrt(n)

    @property
    def baseline(self) -> float | None:
        """RMSE of the nearest public image, on average over the same images."""
        return self.strongest.number(BASELINE) if self.strongest else None

    @property
    def stops(self) -> bool | None:
        """Whether even the strongest attack comes no closer than the nearest public image; None: not known."""
        return None if self.rmse is None or self.baseline is None else self.rmse > self.baseline


def strongest(cells: Sequence[CellResult]) -> CellResult | None:
    """The cell with the least RMSE; None where none has one."""
    scored = [(cell.rmse, cell) for cell in cells if cell.rmse is not None]
    return min(scored, key=lambda pair: pair[0])[1] if scored else None


def levels(evaluation: Evaluation, batch_size: int) -> list[Level]:
    """Every defense at every strength for one batch size, in the order of the grid; no defense comes first."""
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
        ]
        found.append(
            Level(
                defense,
                strength,
                batch_size,
                evaluation.title(defense, strength),
                strongest(cells),
                None if accuracy is None or reference is None else reference - accuracy,
                accuracy,
                training.number("final_train_loss") if training else None,
            )
        )
    return found


def pareto_front(points: Sequence[Level]) -> list[Level]:
    """Levels that no other beats in accuracy and in RMSE of the strongest attack at once, by falling accuracy."""
    known = [level for level in points if level.accuracy is not None and level.rmse is not None]
    front: list[Level] = []
    for level in sorted(known, key=lambda one: (-(one.accuracy or 0.0), -(one.rmse or 0.0))):
        if not front or (level.rmse or 0.0) > (front[-1].rmse or 0.0):
            front.append(level)
    return front


def best_within(points: Sequence[Level], budget: float) -> dict[str, Level]:
    """By defense, the strength that protects best among those that lose at most `budget` of the accuracy.

    No defense stands under its own name: what protects less than it is not worth its price.
    """
    best: dict[str, Level] = {}
    for level in points:
        if level.price is None or level.rmse is None or level.price > budget + 1e-12:
            continue
        if level.defense not in best or level.rmse > (best[level.defense].rmse or 0.0):
            best[level.defense] = level
    return best
