"""The cells of a two-layer study: one network size, noise and defense each, in a file of its own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from lit_recon.cli.bounds_settings import AXES, Sizes, TheorySettings

#: Settings that decide what a cell computes, besides its sizes and its defense.
_SHARED = ("seed", "local_rho", "attacks", "activation", "loss", "n_classes", "repeats")


@dataclass(frozen=True)
class TheoryCell:
    """One cell.

    Attributes:
        sizes: of the network, its batch and the noise.
        defense: name, or `none`.
        strength: None without a defense.
        digest: of everything that decides its result.
    """

    sizes: Sizes
    defense: str = "none"
    strength: float | None = None
    digest: str = ""

    @property
    def name(self) -> str:
        """Of the cell's file."""
        sizes, strength = self.sizes, "" if self.strength is None else f"_{self.strength:g}"
        return f"{self.defense}{strength}-d{sizes.d}-m{sizes.m}-b{sizes.batch}-s{sizes.noise:g}-{self.digest}"

    def describe(self) -> str:
        """The cell in words."""
        sizes, strength = self.sizes, "" if self.strength is None else f" {self.strength:g}"
        defense = "no defense" if self.defense == "none" else f"{self.defense}{strength}"
        return f"{defense}, d {sizes.d}, m {sizes.m}, B {sizes.batch}, s {sizes.noise:g}"

    def identity(self) -> dict[str, Any]:
        """What a cell's file says about it."""
        return {"defense": self.defense, "strength": self.strength, **asdict(self.sizes)}


def build_cells(settings: TheorySettings, own: Mapping[str, Any]) -> list[TheoryCell]:
    """All cells, without repetitions: the sweeps, then every defense at every strength, then sweeps under defenses.

    Args:
        settings: of the study.
        own: the same, as the nested mapping that its configuration file would hold.
    """
    shared = {key: own[key] for key in _SHARED}
    found = dict.fromkeys(_cells(settings))
    return [
        replace(cell, digest=_digest({**shared, **cell.identity(), "how": own["defenses"].get(cell.defense)}))
        for cell in found
    ]


def _cells(settings: TheorySettings) -> Iterator[TheoryCell]:
    yield TheoryCell(settings.base)
    for axis in AXES:
        for value in settings.sweeps.of(axis):
            yield TheoryCell(_changed(settings.base, axis, value))
    for name, family in settings.defenses.items():
        for strength in family.values:
            yield TheoryCell(settings.base, name, strength)
    for name, family in settings.defenses.items():
        for axis in ("d", "m", "batch"):
            for value in settings.sweeps.of(axis) if family.at is not None else ():
                yield TheoryCell(_changed(settings.base, axis, value), name, family.at)


def _changed(base: Sizes, axis: str, value: float) -> Sizes:
    change: dict[str, Any] = {axis: value}
    return replace(base, **change)


def _digest(content: Mapping[str, Any]) -> str:
    how = content["how"]
    # strengths that a family has besides, and words, change no cell
    kept = {**content, "how": how and {key: how[key] for key in ("defense", "relative")}}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:8]
