"""The figure that an evaluation judges attacks by: how close they come, in images or in features."""

from __future__ import annotations

from dataclasses import dataclass

from lit_recon.reporting.formats import Measure, format_score, measure_of

#: Figures whose attacks need not return images.
_OF_FEATURES = ("feature_error", "feature_cosine")


@dataclass(frozen=True)
class Figure:
    """A metric of attacks, under its key in a run's record.

    >>> Figure("psnr").distance(30.0) < Figure("psnr").distance(20.0)
    True
    """

    key: str = "rmse"

    @property
    def measure(self) -> Measure:
        """How it is called and read."""
        return measure_of(self.key)

    @property
    def of_features(self) -> bool:
        """Whether it is about features; images, their baselines and their bounds are then of no account."""
        return self.key in _OF_FEATURES

    @property
    def baseline(self) -> str | None:
        """Key of the same figure of the nearest public image, which everybody has; features have no such guess."""
        return None if self.of_features else f"baseline_nearest_public_{self.key}"

    def distance(self, value: float) -> float:
        """The figure such that more of it means that the attack stayed farther away."""
        return -value if self.measure.better == "↑" else value

    def format(self, value: float | None) -> str:
        """A value for readers."""
        return format_score(self.key, value)
