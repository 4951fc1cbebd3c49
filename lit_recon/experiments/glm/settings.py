"""Settings of attacks on generalized linear models."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from lit_recon.attacks.glm.family import Array
from lit_recon.attacks.glm.training import Regression
from lit_recon.data import ImageSet
from lit_recon.data.informed_splits import InformedSplit, InformedSplitSettings, draw_informed_split
from lit_recon.data.sources import Digits, ImageSource
from lit_recon.data.splits import Pool
from lit_recon.errors import ConfigError
from lit_recon.experiments.call import PaperRunSettings


@dataclass(frozen=True)
class RecordSettings:
    """Training records, attacked records and held-out records.

    Args:
        records: number of records that the model is trained on.
        targets: number of these that are attacked, each by an adversary who knows all others.
        held_out: number of held-out records for the model's accuracy.
        seed: seed of the draw.
        pool: images that targets are drawn from: `development`, `evaluation`, which are disjoint, or `all`.
    """

    records: int = 1_000
    targets: int = 50
    held_out: int = 500
    seed: int = 0
    pool: Pool = "evaluation"

    def __post_init__(self) -> None:
        if not 1 <= self.targets < self.records or self.held_out < 2:
            raise ConfigError(
                "split.targets must be at least 1 and below split.records, and split.held_out at least 2; "
                f"got {self.targets}, {self.records} and {self.held_out}"
            )

    def drawn(self, source: ImageSource) -> InformedSplit:
        """Disjoint targets, other records, and held-out records (as the split's shadow targets)."""
        sizes = InformedSplitSettings(self.records - self.targets, self.held_out, self.targets, self.seed, self.pool)
        return draw_informed_split(source, sizes, fixed="records", shadow="held_out")


@dataclass(frozen=True, kw_only=True)
class GlmSettings(PaperRunSettings):
    """One run of `reconn.py glm`.

    Args:
        data: where images come from, training and test images together.
        split: the records.
        target: the model's target for an image: its label, or whether the label is odd.
        regression: the model under attack.
        beside: further models of the same records by name, attacked in the same way for comparison.
    """

    data: ImageSource = field(default_factory=Digits)
    split: RecordSettings = field(default_factory=RecordSettings)
    target: Literal["label", "odd"] = "label"
    regression: Regression
    beside: dict[str, Regression] = field(default_factory=dict)

    def __post_init__(self) -> None:
        odd = [name for name in self.beside if not re.fullmatch(r"[a-z][a-z0-9_]*", name)]
        if odd:
            raise ConfigError(f"names in beside must be lower-case letters, digits and underscores; got {odd}")

    @property
    def models(self) -> dict[str, Regression]:
        """All models by name; the model under attack has an empty name."""
        return {"": self.regression, **self.beside}

    def records(self, images: ImageSet) -> tuple[Array, Array]:
        """Images as records: pixels `(n, d)` in [0, 1], exact to float64, and targets `(n,)`."""
        labels = images.labels.numpy()
        pixels = images.images.flatten(1).numpy().astype(np.float64) / 255
        return pixels, (labels % 2 if self.target == "odd" else labels).astype(np.float64)

    def check_classes(self, targets: Array) -> None:
        """Refuse, by a ConfigError, equal targets, and classifiers that lack a class: others would be renumbered."""
        found = np.unique(targets)
        if any(model.classifies for model in self.models.values()) and not np.array_equal(found, np.arange(len(found))):
            raise ConfigError(
                f"a classifier needs records of every class from 0 on; got {found.astype(int).tolist()}: raise "
                "split.records, or renumber the labels of the data without gaps"
            )
        if len(found) < 2:
            raise ConfigError("all records have the same target: raise split.records, or choose another target")
