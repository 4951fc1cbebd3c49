"""The comparison of a grid's defenses in sentences: which is the best, how sure that is, and what is not measured."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lit_recon.experiments.evaluate.comparison import DefenseComparison
from lit_recon.experiments.evaluate.equal_utility import rows_under
from lit_recon.reporting.wording import percent, short, strength_in_words

Row = Mapping[str, Any]


@dataclass(frozen=True)
class GridNames:
    """Defenses, attacks and the metric of a grid in words.

    Args:
        defenses: titles by name.
        attacks: titles by name, of those that are compared.
        strengths: by defense, in the order of the grid.
        metric: name of the metric.
        show: a value of the metric, with the sign that makes larger ones worse reconstructions, as text.
    """

    defenses: Mapping[str, str]
    attacks: Mapping[str, str]
    strengths: Mapping[str, Sequence[float]]
    metric: str
    show: Callable[[float], str]

    def title(self, defense: str, strengths: Sequence[float | None]) -> str:
        """A defense at some of its strengths; at all of them without numbers."""
        if None in strengths:
            return "no defense"
        every = [*strengths] == [*self.strengths[defense]]
        words = listed(strength_in_words(value) for value in strengths if value is not None)
        return self.defenses[defense] + ("" if every else f" {words}")


def listed(words: Iterable[str]) -> str:
    """Several words or none, as in a sentence.

    >>> listed(["one"]), listed(["one", "two", "three"])
    ('one', 'one, two and three')
    """
    *others, last = [*words] or [""]
    return f"{', '.join(others)} and {last}" if others else last


def conclude(names: GridNames, compared: DefenseComparison, partial: bool = False) -> str:
    """Which defense protects best against these attacks, at which cost, and in how many of the draws.

    `partial` says that results are missing, which may change it.
    """
    side, said = compared.side, _best(names, compared)
    if compared.futile:
        said = "nothing is known: without a defense no attack is better than the nearest public image"
    if side.without:
        servers = f" for {side.servers}" if side.servers else ""
        said = f"without {side.without} the conclusion{servers} would be: {said}"
    elif side.servers:
        said = f"against {side.servers}, {said}"
    said = f"as far as measured, {said}" if partial else said
    return f"{said[0].upper()}{said[1:]}."


def _best(names: GridNames, compared: DefenseComparison) -> str:
    only, *others = next(iter(compared.found.values()))
    metric, of_draws = f"{names.metric} ", " of the draws"  # said once
    places: dict[str | None, list[str]] = {}  # by the best defense; None where none is better than no defense
    for limit, found in compared.found.items():
        best = max(found, key=lambda name: found[name].value)
        own, points = found[best], short(100 * limit, 6)
        place = f"{points} point{'s' * (points != '1')}"
        if own.strengths == (None,):
            places.setdefault(None, []).append(place)
            continue
        text, metric = f"{metric}{names.show(own.value)}", ""
        if own.interval and others:
            text, of_draws = f"{text}, best in {percent(own.best)}{of_draws}", ""
            rival = max(found, key=lambda name: found[name].best if found[name].interval else 0.0)
            if found[rival].best > own.best:  # its error is the larger one in more of the draws, if not in the mean
                text = f"{text}, {names.defenses[rival]} in {percent(found[rival].best)}"
        places.setdefault(best, []).append(f"{place} ({text})")
    said: list[str] = []
    for winner, where in places.items():
        if others:
            who = "no defense does better than none" if winner is None else f"{names.defenses[winner]} protects best"
        else:
            who = "it" if said else f"{names.defenses[only]}, the only defense compared,"
            who += f" does {'no ' * (winner is None)}better than none"
        said.append(f"{who} at a cost of at most {listed(where)}")
    return f"{'; '.join(said)}; without a defense {names.metric} is {names.show(compared.plain)}"


def has_result(cell: Row) -> bool:
    """Whether a row of `evaluation.csv` has its metrics, or cannot have any."""
    return not cell.get("reason") or cell.get("applicable") == "false"


def missing(
    names: GridNames, trainings: Sequence[Row] | None, cells: Sequence[Row], barred: Collection[str] = ()
) -> list[str]:
    """Sentences that name the strengths of a grid without results, and those that lack some of them.

    `trainings` are rows of `utility.csv`, None where the grid has no trainings; `cells` are those of `evaluation.csv`
    for one batch size. Attacks that are `barred` are not missed.
    """
    attacks = {name: title for name, title in names.attacks.items() if name not in barred}
    unmeasured: dict[str, list[float | None]] = {}
    incomplete: dict[tuple[str, str], list[float | None]] = {}
    levels = [("", None), *((name, value) for name, values in names.strengths.items() for value in values)]
    for name, value in levels:
        own = rows_under(name, value, cells)
        trained = trainings is None or rows_under(name, value, trainings)
        settled = [row for row in own if has_result(row)]
        without = [attacks[row["attack"]] for row in own if row not in settled and row["attack"] in attacks]
        without += [title for attack, title in attacks.items() if attack not in {row["attack"] for row in own}]
        if not settled and without:
            unmeasured.setdefault(name, []).append(value)
        elif lacking := [*dict.fromkeys(without), *(["accuracy"] if not trained else [])]:
            incomplete.setdefault((name, listed(lacking)), []).append(value)
    said = [("Not measured yet", "; ".join(names.title(*one) for one in unmeasured.items()))]
    parts = [f"{names.title(name, values)} ({lacking} missing)" for (name, lacking), values in incomplete.items()]
    said.append(("Incomplete", "; ".join(parts)))
    return [f"{what}: {text}." for what, text in said if text]
