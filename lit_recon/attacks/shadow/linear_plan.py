"""Shadow models by linear response, used only where a sample of exact ones vouches for them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from lit_recon.attacks.shadow.engine import Execution
from lit_recon.attacks.shadow.linear_response import LinearResponse, bytes_per_model, n_coordinates, respond
from lit_recon.attacks.shadow.plan import ShadowPlan
from lit_recon.attacks.shadow.store import ShadowStore
from lit_recon.attacks.shadow.training import GradientDescent
from lit_recon.data import ImageSet
from lit_recon.errors import ConfigError, CorruptFileError, MissingDataError
from lit_recon.io.files import write_text


@dataclass(frozen=True)
class ApproximationError:
    """The errors of a sample, and how large they may be.

    Attributes:
        errors: `|linear - exact| / |exact|` of every model's difference from the reference.
        tolerance: largest median that linear response is used with.

    >>> ApproximationError([0.1, 0.2, 0.9], tolerance=0.4).is_tolerable
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
    def read(cls, folder: Path, n: int, tolerance: float) -> ApproximationError:
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


#: Memory of the models that go along the path together; after a kill, their part of the work is done again.
_TOGETHER_BYTES = 192 * 2**20
#: What linear response knows of an optimizer.
_KNOWN_SETTINGS = {"steps", "lr", "momentum"}


@dataclass(frozen=True, eq=False)
class LinearPlan:
    """Shadow models that a linear response stands for, where it is tolerable.

    Attributes:
        exact: the models that they stand for.
        response: how, and how far it is trusted.
        kind: `linear`: all models, or an error; `mixed`: the sample stays exact, and all models are trained exactly
            where linear response is not tolerable.

    Raises:
        ConfigError: linear response is not for such models.
    """

    exact: ShadowPlan
    response: LinearResponse
    kind: Literal["linear", "mixed"]

    def __post_init__(self) -> None:
        default = GradientDescent()
        for setting in fields(GradientDescent):
            value = getattr(self.exact.descent, setting.name)
            if setting.name not in _KNOWN_SETTINGS and value and value != getattr(default, setting.name):
                raise self._refusal(f"descent.{setting.name}={value}")
        if self.exact.initialization != "known":
            raise self._refusal(f"initialization={self.exact.initialization}")
        n_coordinates(self.exact.network, self.exact.fixed.images[0].numel(), self.response.rank)

    def _refusal(self, setting: str) -> ConfigError:
        return ConfigError(
            "linear response is for gradient descent on full batches, with momentum or without, from known initial "
            f"weights; got {setting}: set shadows to exact"
        )

    @property
    def fixed(self) -> ImageSet:
        """The fixed set."""
        return self.exact.fixed

    @property
    def description(self) -> dict[str, object]:
        """What a store has to agree in: that of the exact models, and how far these are from them."""
        response = {f"shadows.{key}": value for key, value in asdict(self.response).items()}
        return {**self.exact.description, "shadows": self.kind, **response}

    def execution(self) -> Execution:
        """The fastest way for those that are trained exactly."""
        return self.exact.execution()

    def sample(self, images: ImageSet) -> ImageSet:
        """The images whose models are also trained exactly, the first ones.

        Raises:
            ConfigError: there are fewer images.
        """
        if len(images) < self.response.sample:
            raise ConfigError(
                f"linear.sample must be at most the number of shadow models, {len(images)}; got {self.response.sample}"
            )
        return images.subset(torch.arange(self.response.sample))

    @staticmethod
    def sample_folder(folder: Path) -> Path:
        """Where a store keeps the exact models of its sample."""
        return folder / "exact_sample"

    def measure(self, folder: Path, images: ImageSet) -> None:
        """Compare the sample's exact models, which are there, with linear response, and keep the errors in the store.

        Args:
            folder: of the store.
            images: one per model of the whole plan.
        """
        sample = self.sample(images)
        exact = self._exact_sample(folder, sample)
        linear = torch.cat(list(self._respond([sample])))
        errors = (linear - exact).norm(dim=1) / exact.norm(dim=1)
        ApproximationError(errors.tolist(), self.response.tolerance).write(folder)

    def measured(self, folder: Path) -> ApproximationError:
        """What `measure` found for the store in a folder.

        Raises:
            MissingDataError: it has not been measured.
            CorruptFileError: its file is damaged.
        """
        return ApproximationError.read(folder, self.response.sample, self.response.tolerance)

    def is_measured(self, folder: Path) -> bool:
        """Whether `measure` was called for the store in a folder."""
        return ApproximationError.path(folder).is_file()

    def trusted(self, folder: Path) -> bool:
        """Whether linear response is used; False where all models are exact instead.

        Raises:
            ConfigError: linear response is not tolerable, and nothing else was asked for.
        """
        measured = self.measured(folder)
        if not measured.is_tolerable and self.kind == "linear":
            raise ConfigError(
                f"{measured.sentence}: raise linear.rank or linear.hessian_images, or set shadows to mixed or exact"
            )
        return measured.is_tolerable

    def facts(self, folder: Path, n: int) -> dict[str, float | int | str]:
        """For the record of a run with `n` of these models: how many are not exact, and how far they may be off."""
        measured = self.measured(folder)
        exact = 0 if self.kind == "linear" else self.response.sample if measured.is_tolerable else n
        return {
            "shadows": self.kind,
            "n_linear": n - exact,
            "linear_error": measured.median,
            "linear_error_max": max(measured.errors),
            "linear_error_n": len(measured.errors),
            "linear_tolerance": measured.tolerance,
        }

    def sentence(self, folder: Path, n: int) -> str:
        """How `n` of these models were made, in words."""
        linear = self.facts(folder, n)["n_linear"]
        made = f"{linear} of the {n} shadow models were made by linear response"
        return f"{made if linear else f'All {n} shadow models were trained exactly'}: {self.measured(folder).sentence}."

    def train_shards(self, store: ShadowStore, shards: Sequence[int], images: ImageSet) -> Iterator[int]:
        """Train and keep the models of some shards; yields each shard's number when it is there.

        Args:
            store: that `measure` was called for.
            shards: that are missing.
            images: one per model of the whole plan.
        """
        if not self.trusted(store.folder):
            yield from self.exact.train_shards(store, shards, images)
            return
        exact = self._exact_sample(store.folder, self.sample(images)) if self.kind == "mixed" else torch.empty(0)
        together = max(1, _TOGETHER_BYTES // (bytes_per_model(self.exact.known, self.response.rank) * store.shard_size))
        for start in range(0, len(shards), together):
            some = shards[start : start + together]
            members = [store.members(shard, len(images)) for shard in some]
            groups = [images.subset(torch.tensor(list(each))) for each in members]
            for shard, each, own, found in zip(some, members, groups, self._respond(groups), strict=True):
                kept = exact[each.start : each.stop]
                store.write(shard, torch.cat([kept, found[len(kept) :]]), own)
                yield shard

    def _exact_sample(self, folder: Path, sample: ImageSet) -> Tensor:
        there = self.sample_folder(folder)
        store = ShadowStore.open(there, self.exact.description)
        if store is None:
            raise MissingDataError(
                f"{there} holds no exact models to measure linear response by: `python train.py shadows`"
            )
        return store.read(sample)

    def _respond(self, groups: Sequence[ImageSet]) -> Iterator[Tensor]:
        device = self.exact.device
        tensors = [(own.pixels().to(device), own.labels.to(device)) for own in groups]
        initial = self.exact.initial_weights().to(device)
        for found in respond(self.exact.known, initial, tensors, self.response):
            yield found.cpu()


#: Where an adversary has shadow models from.
Plan = ShadowPlan | LinearPlan
