"""How far linear response is from exact training, as measured on a sample before it is used."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lit_recon.errors import CorruptFileError, MissingDataError
from lit_recon.reporting.atomic import write_text


@dataclass(frozen=True)
class MeasuredError:
    """The errors of a sample, and how large they may be.

    Attributes:
        errors: `|linear - exact| / |exact|` of every model's difference from the reference.
        tolerance: largest median that linear response is used with.

    >>> MeasuredError([0.1, 0.2, 0.9], tolerance=0.4).is_tolerable
    True
    """

    errors: Sequence[float]
    tolerance: float

    @property
    def median(self) -> float:
        """Of the errors."""
        return float(torch.tensor(self.errors, dtype=torch.float64).quantile(0.5))

    @property
    def is_tolerable(self) -> bool:
        """Whether linear response is used."""
        return self.median <= self.tolerance

    @property
    def sentence(self) -> str:
        """In words, without a full stop."""
        return (
            f"on {len(self.errors)} models trained exactly, linear response has a median relative error of "
            f"{self.median:.3f} and at most {max(self.errors):.3f}, where a median of {self.tolerance:g} is tolerated"
        )

    @staticmethod
    def path(folder: Path) -> Path:
        """Where a store keeps the errors."""
        return folder / "linear_response.json"

    def write(self, folder: Path) -> None:
        """Keep the errors in a store."""
        write_text(self.path(folder), json.dumps({"errors": list(self.errors)}) + "\n")

    @classmethod
    def read(cls, folder: Path, n: int, tolerance: float) -> MeasuredError:
        """The errors of `n` models that a store keeps.

        Raises:
            MissingDataError: nothing has been measured.
            CorruptFileError: the file is damaged.
        """
        path = cls.path(folder)
        if not path.is_file():
            raise MissingDataError(
                f"{path} is not there: the error of linear response has not been measured: `python train.py shadows`"
            )
        try:
            errors = [float(error) for error in json.loads(path.read_text(encoding="utf-8"))["errors"]]
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptFileError(f"{path} is damaged ({error}): delete it, and it is measured again") from error
        if len(errors) != n:
            raise CorruptFileError(
                f"{path} must hold the errors of {n} models; got {len(errors)}: delete it, and it is measured again"
            )
        return cls(errors, tolerance)
