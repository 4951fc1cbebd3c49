"""A run's victims as the pieces of a page: one card per image, grouped by the batch that was attacked as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lit_recon.measures import MEASURES
from lit_recon.reporting.plots import data_uri
from lit_recon.reporting.record import RunRecord
from lit_recon.reporting.wording import closer_than_public, format_score
from lit_recon.reporting.writing import VictimRow

#: From this many victims on, cards are small, and the best, median and worst are shown large before them.
_MANY = 25
#: Up to this many, cards are wide.
_FEW = 3
_SMALL_SIDE = 64
#: Metrics that cards do not list: RMSE stands below the images, and MSE says the same.
_NOT_LISTED = ("rmse", "mse")


@dataclass(frozen=True)
class Card:
    """One victim.

    Attributes:
        title: id and class of the image.
        label_note: what the label was taken for, where the attack got it wrong.
        closer: whether the reconstruction beats the nearest public image; None where that is not known.
        target, reconstruction, nearest_public: images as data addresses; the last is empty without public images.
        rmse, nearest_rmse: of the reconstruction and of the nearest public image.
        scores: `(name, value)` of the reconstruction's other scores.
        rank: `Best`, `Median`, `Worst`, or nothing.
    """

    title: str
    label_note: str
    closer: bool | None
    target: str
    reconstruction: str
    nearest_public: str
    rmse: str
    nearest_rmse: str
    scores: list[tuple[str, str]]
    rank: str = ""


@dataclass(frozen=True)
class CardGroup:
    """The victims of one batch, or, untitled, of many batches of one image each."""

    title: str
    cards: list[Card]


@dataclass(frozen=True)
class Gallery:
    """All cards of a run.

    Attributes:
        groups: every victim once.
        extremes: the best, median and worst by RMSE, where there are too many victims to take in at once.
        compact: whether the cards of `groups` are to be small.
        card_width: the least width of a card of `groups`, in CSS pixels.
        pixelated: whether images are so small that a page has to enlarge them.
        public: whether the cards show public images.
    """

    groups: list[CardGroup]
    extremes: list[Card]
    compact: bool
    card_width: int
    pixelated: bool
    public: bool


def gallery(record: RunRecord) -> Gallery:
    """The cards of all victims of a run."""
    closer = closer_than_public(record)
    batches: dict[int, list[int]] = {}
    for index, row in enumerate(record.victims):
        batches.setdefault(row.batch, []).append(index)
    if all(len(members) == 1 for members in batches.values()):
        groups = [CardGroup("", [_card(record, index, closer) for index in range(len(record.victims))])]
    else:
        groups = [
            CardGroup(
                f"Batch {batch} · loss {record.victims[members[0]].loss:.3g}",
                [_card(record, index, closer) for index in members],
            )
            for batch, members in sorted(batches.items())
        ]
    many, small = len(record.victims) >= _MANY, is_small(record)
    return Gallery(
        groups,
        [_card(record, index, closer, rank) for rank, index in _extremes(record.victims)] if many else [],
        compact=many,
        card_width=162 if many else 280 if small and len(record.victims) > _FEW else 380,
        pixelated=small,
        public=record.nearest_public is not None,
    )


def is_small(record: RunRecord) -> bool:
    """Whether the images of a run have so few pixels that a page enlarges them and should show each pixel."""
    side: int = max(record.targets.shape[2:])
    return side <= _SMALL_SIDE


def class_name(record: RunRecord, label: int) -> str:
    """The name of a class; its number, said to be one, where it has no other name."""
    name = record.class_names[label] if 0 <= label < len(record.class_names) else str(label)
    return f"class {name}" if name.isdecimal() else name


def _card(record: RunRecord, index: int, closer: Sequence[bool | None], rank: str = "") -> Card:
    row = record.victims[index]
    wrong = row.recovered_label != row.label
    return Card(
        title=f"#{row.id} · {class_name(record, row.label)}",
        label_note=_label_note(record, row.recovered_label) if wrong else "",
        closer=closer[index],
        target=data_uri(record.targets[index]),
        reconstruction=data_uri(record.reconstructions[index]),
        nearest_public="" if record.nearest_public is None else data_uri(record.nearest_public[index]),
        rmse=format_score("rmse", row.scores.get("rmse")),
        nearest_rmse=format_score("rmse", row.scores.get("nearest_public_rmse")),
        scores=[
            (measure.name, format_score(measure, value, unit=False))
            for measure in (record.measures or MEASURES).values()
            # where a whole run lacks a score, the table says why
            if measure.key not in _NOT_LISTED and (value := row.scores.get(measure.key)) is not None
        ],
        rank=rank,
    )


def _label_note(record: RunRecord, recovered: int) -> str:
    return f"label taken for {class_name(record, recovered)}" if recovered >= 0 else "label not recovered"


def _extremes(victims: Sequence[VictimRow]) -> list[tuple[str, int]]:
    known = [(rmse, index) for index, row in enumerate(victims) if (rmse := row.scores.get("rmse")) is not None]
    order = [index for _, index in sorted(known)]
    return [("Best", order[0]), ("Median", order[len(order) // 2]), ("Worst", order[-1])] if order else []
