"""Settings of `attack.py bounds`: sizes, noise, defenses, and attacks to compare with bounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from lit_recon.attacks.updates.features.layer import FeatureRecovery
from lit_recon.bounds import RATES
from lit_recon.bounds.two_layer import Loss
from lit_recon.defenses import Defense
from lit_recon.errors import ConfigError
from lit_recon.experiments.call import PaperRunSettings, check_range
from lit_recon.experiments.engine.pieces import settings_hash
from lit_recon.reporting.wording import strength_in_words

#: The quantities that a sweep may vary.
AXES = ("d", "m", "batch", "noise")


@dataclass(frozen=True)
class Sizes:
    """One two-layer network, its batch, and the noise on its update; ConfigError for more examples than inputs.

    Args:
        d: inputs.
        m: neurons.
        batch: examples `B`.
        noise: standard deviation `s` of the noise on the summed gradient's coordinates, even without a defense.
    """

    d: int = 32
    m: int = 2048
    batch: int = 2
    noise: float = 0.03

    def __post_init__(self) -> None:
        if self.d < 2 or self.m < 2 or not 1 <= self.batch <= self.d or not 0 < self.noise < math.inf:
            raise ConfigError(
                "a two-layer study needs d and m of at least 2, 1 <= batch <= d and noise above 0; got "
                f"d={self.d}, m={self.m}, batch={self.batch} and noise={self.noise:g}"
            )


@dataclass(frozen=True)
class Sweeps:
    """The values of each quantity, with the others at the base; empty: not varied.

    Args:
        d, m, batch, noise: see `Sizes`.
    """

    d: list[int] = field(default_factory=list)
    m: list[int] = field(default_factory=list)
    batch: list[int] = field(default_factory=list)
    noise: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class TwoLayerDefense:
    """A defense at several strengths; ConfigError for none, repeated ones, and those that are not positive.

    Args:
        values: values of its first argument, the strength.
        defense: the defense without its strength; null: local steps, with `values` as their numbers.
        relative: values are in units of the norm of the gradient (of single gradients: of their median norm).
        at: the value at which d, m and B are varied too; default: not varied.
        rate: its column in the table of orders.
        title: for tables; default: the name in the study.
    """

    values: list[float]
    defense: Callable[[float], Defense] | None = None
    relative: bool = False
    at: float | None = None
    rate: str = ""
    title: str = ""

    def __post_init__(self) -> None:
        if not self.values or len(set(self.values)) < len(self.values) or min(self.values) <= 0:
            raise ConfigError(f"a defense needs strengths above 0 that differ from each other; got {self.values}")
        if self.at is not None and self.at not in self.values:
            raise ConfigError(f"`at` must be one of the strengths {self.values}; got {self.at:g}")
        if self.rate and self.rate not in RATES:
            raise ConfigError(f"rate must be one of {', '.join(RATES)}; got {self.rate!r}")
        if self.defense is None and any(value != int(value) or value < 2 for value in self.values):
            raise ConfigError(f"local steps must be integers of at least 2; got {self.values}: or name a defense")


@dataclass(frozen=True)
class TwoLayerAttack:
    """An attack on features.

    Args:
        recovery: the attack, such as MomentRecovery or ExactRecovery.
        released: observed gradients: `both`, or that of the `head` only.
        title: for tables; default: the name in the study.
        at_most: largest neurons times inputs for which it is run; default: no limit.
    """

    recovery: FeatureRecovery
    released: Literal["both", "head"] = "both"
    title: str = ""
    at_most: int | None = None


@dataclass(frozen=True, kw_only=True)
class TwoLayerSettings(PaperRunSettings):
    """One run of `attack.py bounds`: attacks on two-layer networks and lower bounds on their errors.

    Weights are drawn from N(0, 1), heads from N(0, 1/m^2), inputs uniformly from the unit sphere. ConfigError for
    nothing to vary, no attack, or a number out of its range.

    Args:
        seed: seed of all draws.
        base: sizes that stay fixed while one is varied.
        sweeps: varied sizes.
        defenses: by name; no defense is always part of the study.
        local_rho: a first local step moves each layer by this share of its norm.
        attacks: by name.
        activation: activation of the neurons.
        loss: `squared` with one output and targets -1 and 1, or `cross_entropy`.
        n_classes: outputs under cross-entropy.
        repeats: independent draws per cell.
        epsilons: privacy budgets for which the noise is computed; with the squared loss only.
        delta: probability with which the privacy guarantee may fail.
        threads: CPU threads; default: PyTorch's choice.
    """

    seed: int = 0
    base: Sizes = field(default_factory=Sizes)
    sweeps: Sweeps = field(default_factory=Sweeps)
    defenses: dict[str, TwoLayerDefense] = field(default_factory=dict)
    local_rho: float = 0.01
    attacks: dict[str, TwoLayerAttack]
    activation: Literal["relu", "elu", "gelu", "tanh", "sigmoid", "softplus"] = "gelu"
    loss: Loss = "squared"
    n_classes: int = 10
    repeats: int = 4
    epsilons: list[float] = field(default_factory=lambda: [1.0, 10.0, 100.0, 1000.0])
    delta: float = 1e-5
    threads: int | None = None

    def __post_init__(self) -> None:
        if not self.attacks or self.repeats < 2:
            raise ConfigError(
                f"a study needs at least one attack and 2 repeats, to know its own spread; got {len(self.attacks)} and "
                f"{self.repeats}"
            )
        if "none" in self.defenses:
            raise ConfigError("no defense is always part of the study: leave 'none' out of `defenses`")
        check_range({"n_classes": self.n_classes}, 2)
        check_range({"local_rho": self.local_rho, "delta": self.delta}, 0, 1, strict=True)
        check_range({"epsilons": self.epsilons}, 0, strict=True)
        if not any(vars(self.sweeps).values()):
            raise ConfigError(f"a study needs a size to vary; got none: give `sweeps` values of {', '.join(AXES)}")


#: Settings that decide what a cell computes, besides its sizes and its defense.
_SHARED = ("seed", "local_rho", "attacks", "activation", "loss", "n_classes", "repeats")


@dataclass(frozen=True)
class TwoLayerCell:
    """One cell, by default without a defense."""

    sizes: Sizes
    defense: str = "none"
    strength: float | None = None
    digest: str = ""  # hash of everything that determines the result; seeds the draws

    @property
    def name(self) -> str:
        """Of the cell's folder."""
        sizes, strength = self.sizes, "" if self.strength is None else f"_{strength_in_words(self.strength)}"
        return f"{self.defense}{strength}-d{sizes.d}-m{sizes.m}-b{sizes.batch}-s{sizes.noise:g}-{self.digest}"

    def describe(self) -> str:
        """A one-line description."""
        sizes = self.sizes
        defense = "no defense" if self.strength is None else f"{self.defense} {strength_in_words(self.strength)}"
        return f"{defense}, d {sizes.d}, m {sizes.m}, B {sizes.batch}, s {sizes.noise:g}"

    def identity(self) -> dict[str, Any]:
        """The entries that identify the cell in its file."""
        return {"defense": self.defense, "strength": self.strength, **asdict(self.sizes)}


def build_cells(settings: TwoLayerSettings, own: Mapping[str, Any]) -> list[TwoLayerCell]:
    """All cells, each once: sweeps, defenses, sweeps under defenses; `own` are the settings as in their file."""
    base, defenses = settings.base, settings.defenses
    found = [TwoLayerCell(base), *(TwoLayerCell(sizes) for sizes in _swept(settings, AXES))]
    found += [TwoLayerCell(base, name, strength) for name, family in defenses.items() for strength in family.values]
    found += [
        TwoLayerCell(sizes, name, family.at)
        for name, family in defenses.items()
        if family.at is not None
        for sizes in _swept(settings, AXES[:3])
    ]
    shared = {key: own[key] for key in _SHARED}
    return [replace(cell, digest=_digest(cell, own["defenses"], shared)) for cell in dict.fromkeys(found)]


def _swept(settings: TwoLayerSettings, axes: Sequence[str]) -> list[Sizes]:
    sweeps = vars(settings.sweeps)
    return [replace(settings.base, **{axis: value}) for axis in axes for value in sweeps[axis]]


def _digest(cell: TwoLayerCell, defenses: Mapping[str, Any], shared: Mapping[str, Any]) -> str:
    how = defenses.get(cell.defense)
    # the other strengths of a family, and its titles, change no cell
    how = how and {key: how[key] for key in ("defense", "relative")}
    return settings_hash({**shared, **cell.identity(), "how": how})
