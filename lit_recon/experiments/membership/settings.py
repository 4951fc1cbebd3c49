"""Settings of `reconn.py membership`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from lit_recon.attacks.released.base import Reconstructor
from lit_recon.attacks.released.kernel_ridge import KernelRidge
from lit_recon.errors import ConfigError
from lit_recon.experiments.call import PaperRunSettings, check_range


@dataclass(frozen=True)
class HistogramSettings:
    """Losses on single images, of models with and without them.

    Args:
        images: number of images: the second candidates of the first games.
        models: number trained on each of them, with different initial weights. The shadow models are those without it.
    """

    images: int = 4
    models: int = 200

    def __post_init__(self) -> None:
        check_range({"histogram.images": self.images, "histogram.models": self.models}, 1)


@dataclass(frozen=True, kw_only=True)
class MembershipSettings(PaperRunSettings):
    """One run of `reconn.py membership`, besides the settings of its shadow models; each game takes two test targets.

    Args:
        adversary_execution: how the adversary trains on both candidates; other ones than `execution` round differently.
        reconstructor: attack on released models whose reconstructions are turned into guesses.
        false_positive_rates: rates at which the true positive rate is reported.
        histogram: losses with and without single images.
    """

    adversary_execution: Literal["auto", "batched_mlp", "vmap", "loop"] = "auto"
    reconstructor: Reconstructor = field(default_factory=KernelRidge)
    false_positive_rates: list[float] = field(default_factory=lambda: [0.01, 0.1])
    histogram: HistogramSettings = field(default_factory=HistogramSettings)

    def __post_init__(self) -> None:
        check_range({"false_positive_rates": self.false_positive_rates}, 0, 1)

    def check_games(self, bits: Sequence[int]) -> None:
        """Refuse, by a ConfigError, games that cannot be scored, given their membership bits, or not be plotted."""
        if len(set(bits)) < 2:
            raise ConfigError(
                f"all {len(bits)} membership bits are equal, so that no attack can be scored: raise split.targets or "
                "change split.seed"
            )
        if self.histogram.images > len(bits):
            raise ConfigError(
                f"histogram.images must be at most {len(bits)}, the number of games (half of split.targets); "
                f"got {self.histogram.images}"
            )
