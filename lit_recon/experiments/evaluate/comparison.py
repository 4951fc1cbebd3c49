"""Comparisons of a grid's defenses at equal cost: against which attacks, and what was found."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from lit_recon.experiments.evaluate.equal_utility import Protection


class Side(NamedTuple):
    """Some of the attacks, among which the strongest is sought."""

    key: str  # in metrics.json
    servers: str  # of the attacks, such as "honest servers"; empty where all are of one kind
    without: str  # titles of the attacks that are left out to show what they change
    barred: frozenset[str]  # all attacks that are left out

    @property
    def title(self) -> str:
        """The servers, and what is left out; empty for all attacks."""
        return ", ".join(filter(None, [self.servers, self.without and f"without {self.without}"]))

    @property
    def words(self) -> str:
        """For the end of another title; empty for all attacks."""
        servers = f"{self.servers} only" if self.servers and self.barred else self.servers
        return f", {self.title.replace(self.servers, servers, 1)}" if self.title else ""


def sides_of(
    attacks: Mapping[str, str],
    malicious: Collection[str],
    without: Sequence[str],
    batch_statistics: Collection[str] = (),
) -> list[Side]:
    """All attacks; those by honest servers, if others attack too; of these, those without statistics and without some.

    Args:
        attacks: titles by name.
        malicious: names of attacks by malicious servers, if honest ones attack as well.
        without: names of attacks that the comparison is repeated without.
        batch_statistics: names of attacks that know the BatchNorm statistics of the client's batch, if others do not.
    """
    found = [Side("", "any server" if malicious else "", "", frozenset())]
    if malicious:
        found.append(Side("honest", "honest servers", "", frozenset(malicious)))
    strict = found[-1]
    barred = strict.barred | {*batch_statistics}
    if barred > strict.barred:
        servers = f"{strict.servers or 'servers'} without batch statistics"
        found.append(Side("no_statistics", servers, "", barred))
    if without:
        titles = " and ".join(attacks.get(name, name) for name in without)
        found.append(Side("without", strict.servers, titles, strict.barred | {*without}))
    return found


class DefenseComparison(NamedTuple):
    """Defenses at equal cost."""

    batch_size: int
    side: Side
    found: Mapping[float, Mapping[str, Protection]]  # by the largest loss, what each leaves the strongest attack
    plain: float  # what no defense leaves it, larger for worse reconstructions
    futile: bool  # even without a defense it is no better than the nearest public image
