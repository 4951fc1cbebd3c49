"""What a training has come to, kept beside the backbone: the price of a defense is paid in these figures."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from lit_recon.errors import CorruptFileError
from lit_recon.reporting.atomic import write_text

#: Inside a run folder.
UTILITY_FILE = "utility.json"

#: Flat figures and facts; None has a reason under the same name with `_reason`.
Figures = dict[str, str | float | None]

_NAMES = ("final_train_loss", "test_loss", "accuracy")


def utility_figures(train_loss: float, test_loss: float, accuracy: float, diverged_at: int | None) -> Figures:
    """Figures of an epoch.

    Args:
        train_loss: mean cross-entropy of the epoch's batches as they came, whatever a defense made of them.
        test_loss: mean cross-entropy on the test split.
        accuracy: on the test split, in [0, 1].
        diverged_at: the step after which the loss was no longer finite.

    >>> utility_figures(0.5, 0.6, 0.9, None)
    {'final_train_loss': 0.5, 'test_loss': 0.6, 'accuracy': 0.9}
    """
    if diverged_at is not None:
        return without_utility(f"the training diverged: its loss was no longer finite after step {diverged_at}")
    figures: Figures = {}
    for name, value in zip(_NAMES, (train_loss, test_loss, accuracy), strict=True):
        if math.isfinite(value):
            figures[name] = value
        else:
            figures[name], figures[f"{name}_reason"] = None, "no example was drawn in the last epoch"
    return figures


def without_utility(reason: str) -> Figures:
    """No figure, and why."""
    figures: Figures = dict.fromkeys(_NAMES)
    return {**figures, **{f"{name}_reason": reason for name in _NAMES}}


def write_utility(folder: Path, figures: Mapping[str, str | float | None]) -> None:
    """Write `utility.json` into a run folder, whole or not at all."""
    write_text(folder / UTILITY_FILE, json.dumps(figures, indent=2, allow_nan=False) + "\n")


def read_utility(folder: Path) -> Figures:
    """The figures in a run folder; without the file, none and why.

    Raises:
        CorruptFileError: the file is damaged.
    """
    path = folder / UTILITY_FILE
    if not path.is_file():
        return without_utility(f"{path} is missing: an earlier release trained this backbone")
    try:
        figures: Figures = dict(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise CorruptFileError(f"{path} is damaged ({error}): train the backbone again") from error
    return figures
