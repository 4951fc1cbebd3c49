"""How far searches for many images have come, kept in a file so that a killed run goes on."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from lit_recon.errors import CorruptFileError
from lit_recon.reporting.atomic import write_bytes


@dataclass(frozen=True, eq=False)
class SearchState:
    """What was found so far; its tensors are changed in place.

    Attributes:
        images: best ones, `(m, c, h, w)`.
        labels: of these, `(m,)`.
        distances: of their weights, `(m,)`; infinite before the first search.
        searches: that were made for each, int64 `(m,)`.
    """

    images: Tensor
    labels: Tensor
    distances: Tensor
    searches: Tensor

    @classmethod
    def of(cls, images: Tensor, labels: Tensor) -> SearchState:
        """Before the first search, from first guesses."""
        never = torch.full((len(images),), torch.inf, dtype=torch.float64)
        return cls(images.clone(), labels.clone(), never, torch.zeros_like(labels))

    def update(self, which: Tensor, labels: Tensor, images: Tensor, distances: Tensor) -> None:
        """Count one search for each of some targets, and keep what is better.

        Args:
            which: positions `(s,)`.
            labels: that the searches were made with, `(s,)`.
            images: found, `(s, c, h, w)`.
            distances: of these, `(s,)`.
        """
        closer = distances < self.distances[which]
        for kept, values in ((self.images, images), (self.labels, labels), (self.distances, distances)):
            kept[which[closer]] = values[closer]
        self.searches[which] += 1

    def write(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        tensors = {field.name: getattr(self, field.name).contiguous() for field in fields(self)}
        write_bytes(path, save(tensors))

    @classmethod
    def read(cls, path: Path) -> SearchState:
        """Read it again.

        Raises:
            CorruptFileError: it is no such file.
        """
        try:
            return cls(**load_file(path))
        except (SafetensorError, OSError, ValueError, TypeError) as error:
            raise CorruptFileError(
                f"{path} is truncated or no state of a search ({error}): delete it to start over"
            ) from error


def state_path(folder: Path, identity: str, *tensors: Tensor) -> Path:
    """A file's name that tells apart searches of other settings or other models.

    Args:
        folder: of the file.
        identity: settings in words.
        tensors: what the searches begin with.
    """
    content = hashlib.sha256(identity.encode())
    for tensor in tensors:
        content.update(tensor.contiguous().numpy().tobytes())
    return folder / f"search_{content.hexdigest()[:16]}.safetensors"
