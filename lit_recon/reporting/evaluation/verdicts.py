"""The verdict on each defense in words: what it takes to stop the strongest attack, and what that costs."""

from __future__ import annotations

from collections.abc import Sequence

from lit_recon.reporting.evaluation.judgement import Level, levels
from lit_recon.reporting.evaluation.results import Evaluation


def verdicts(evaluation: Evaluation) -> list[tuple[str, list[str]]]:
    """By title of the defense, one sentence per batch size, and one more where honest servers alone change it."""
    found: list[tuple[str, list[str]]] = []
    for name, title in evaluation.defenses.items():
        sentences = []
        for size in evaluation.batch_sizes:
            said = _verdict(evaluation, name, levels(evaluation, size))
            sentences.append(f"Batch {size}: {said}")
            honest = _verdict(evaluation, name, levels(evaluation, size, honest=True))
            if evaluation.has_both_servers and honest != said:
                sentences.append(f"Batch {size}, honest servers alone: {honest}")
        found.append((title, sentences))
    return found


def _verdict(evaluation: Evaluation, name: str, points: Sequence[Level]) -> str:
    own = [level for level in points if level.defense == name and level.distance is not None]
    if not own:
        return "cannot be judged, as no attack on it has figures."
    plain = next((level for level in points if level.strength is None), None)
    best = max(own, key=lambda level: level.distance or 0.0)
    if evaluation.figure.of_features:
        without = "" if plain is None or plain.value is None else f" against {_figure(plain)} without a defense"
        return (
            f"the most that it takes is {best.title}, where {_attack(evaluation, best)} leaves a "
            f"{best.figure.measure.name.lower()} of {_figure(best)}{without}{_price(best)}."
        )
    judged = [level for level in own if level.stops is not None]
    if not judged:
        return f"cannot be judged, as the nearest public image has no {evaluation.figure.measure.name}."
    if plain is not None and plain.stops:
        return (
            "cannot be judged: even without a defense no attack of the grid comes closer than the nearest public "
            f"image ({_against(plain)})."
        )
    stopping = next((level for level in judged if level.stops), None)
    if stopping is None:
        return (
            f"no strength of the grid stops the strongest attack. The most that it takes is "
            f"{best.title}, where {_attack(evaluation, best)} still comes closer than the nearest public image "
            f"({_against(best)}){_price(best)}."
        )
    weaker = [level for level in judged[judged.index(stopping) + 1 :] if not level.stops]
    odd = f"; stronger settings do not ({', '.join(level.title for level in weaker)})" if weaker else ""
    margin = ", a margin within one standard error" if _is_close(stopping) else ""
    return (
        f"{stopping.title} stops the strongest attack, {_attack(evaluation, stopping)} "
        f"({_against(stopping)}{margin}){_price(stopping)}{odd}."
    )


def _attack(evaluation: Evaluation, level: Level) -> str:
    return evaluation.attack_title(level.strongest) if level.strongest else "none"


def _figure(level: Level) -> str:
    error = level.standard_error
    return level.figure.format(level.value) + ("" if error is None else f" ± {level.figure.format(error)}")


def _against(level: Level) -> str:
    baseline = level.figure.format(level.baseline)
    return f"{level.figure.measure.name} {_figure(level)} against {baseline} of the nearest public image"


def _price(level: Level) -> str:
    if level.price is None:
        return "; what it costs was not measured"
    points = 100 * level.price
    if points <= 0:
        return f", and costs no accuracy ({-points:.1f} points more)"
    return f", and costs {points:.1f} points of accuracy"


def _is_close(level: Level) -> bool:
    error = level.standard_error
    if error is None or level.value is None or level.baseline is None:
        return False
    return abs(level.value - level.baseline) < error
