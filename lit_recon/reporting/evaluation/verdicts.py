"""The verdict on each defense in words: what it takes to stop the strongest attack, and what that costs."""

from __future__ import annotations

from collections.abc import Sequence

from lit_recon.reporting.evaluation.judgement import Level, levels
from lit_recon.reporting.evaluation.results import Evaluation
from lit_recon.reporting.formats import format_score


def verdicts(evaluation: Evaluation) -> list[tuple[str, list[str]]]:
    """By title of the defense, one sentence per batch size."""
    by_size = {size: levels(evaluation, size) for size in evaluation.batch_sizes}
    return [
        (title, [_verdict(evaluation, name, size, points) for size, points in by_size.items()])
        for name, title in evaluation.defenses.items()
    ]


def _verdict(evaluation: Evaluation, name: str, size: int, points: Sequence[Level]) -> str:
    own = [level for level in points if level.defense == name]
    judged = [level for level in own if level.stops is not None]
    if not judged:
        return f"Batch {size}: cannot be judged, as no attack on it has figures."
    plain = next((level for level in points if level.strength is None), None)
    if plain is not None and plain.stops:
        return (
            f"Batch {size}: cannot be judged: even without a defense no attack of the grid comes closer than the "
            f"nearest public image ({_against(plain)})."
        )
    stopping = next((level for level in judged if level.stops), None)
    if stopping is None:
        best = max(judged, key=lambda level: level.rmse or 0.0)
        return (
            f"Batch {size}: no strength of the grid stops the strongest attack. The most that it takes is "
            f"{best.title}, where {_attack(evaluation, best)} still comes closer than the nearest public image "
            f"({_against(best)}){_price(best)}."
        )
    weaker = [level for level in judged[judged.index(stopping) + 1 :] if not level.stops]
    odd = f"; stronger settings do not ({', '.join(level.title for level in weaker)})" if weaker else ""
    close = _is_close(stopping)
    margin = ", a margin within one standard error" if close else ""
    return (
        f"Batch {size}: {stopping.title} stops the strongest attack, {_attack(evaluation, stopping)} "
        f"({_against(stopping)}{margin}){_price(stopping)}{odd}."
    )


def _attack(evaluation: Evaluation, level: Level) -> str:
    return evaluation.attack_title(level.strongest) if level.strongest else "none"


def _against(level: Level) -> str:
    error = level.standard_error
    plus_minus = "" if error is None else f" ± {format_score('rmse', error)}"
    return (
        f"RMSE {format_score('rmse', level.rmse)}{plus_minus} against "
        f"{format_score('rmse', level.baseline)} of the nearest public image"
    )


def _price(level: Level) -> str:
    if level.price is None:
        return "; what it costs was not measured"
    points = 100 * level.price
    if points <= 0:
        return f", and costs no accuracy ({-points:.1f} points more)"
    return f", and costs {points:.1f} points of accuracy"


def _is_close(level: Level) -> bool:
    error = level.standard_error
    if error is None or level.rmse is None or level.baseline is None:
        return False
    return abs(level.rmse - level.baseline) < error
