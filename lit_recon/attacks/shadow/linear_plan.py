"""Approximated shadow models, used only if a sample of exact models shows that the error is small."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property, partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from lit_recon.attacks.shadow.engine import Execution, full_batch_path
from lit_recon.attacks.shadow.linear_response import LinearResponse, bytes_per_model, n_coordinates, respond
from lit_recon.attacks.shadow.path_response import PathResponse, ResponseSettings
from lit_recon.attacks.shadow.plan import ExactSample, ShadowPlan
from lit_recon.attacks.shadow.sampled_response import n_samples, respond_by_samples
from lit_recon.attacks.shadow.store import ShadowStore
from lit_recon.attacks.shadow.training import GradientDescent, full_precision
from lit_recon.data import ImageSet
from lit_recon.errors import ConfigError, CorruptFileError, MissingDataError
from lit_recon.io.files import parse_json, write_text
from lit_recon.models.released import ReleasedMLP


@dataclass(frozen=True)
class ApproximationError:
    """Errors of linear response on a sample of models.

    >>> ApproximationError([0.1, 0.2, 0.9], tolerance=0.4).is_tolerable
    True
    """

    errors: Sequence[float]  # `|linear - exact| / |exact|` of every model's difference from the reference
    tolerance: float  # largest median error at which linear response is used

    @property
    def median(self) -> float:
        return float(torch.tensor(self.errors, dtype=torch.float64).quantile(0.5))

    @property
    def is_tolerable(self) -> bool:
        return self.median <= self.tolerance

    @property
    def sentence(self) -> str:
        return (
            f"on {len(self.errors)} models trained exactly, the approximation has a median relative error of "
            f"{self.median:.3f} and at most {max(self.errors):.3f}, where a median of {self.tolerance:g} is tolerated"
        )

    @staticmethod
    def path(folder: Path) -> Path:
        """File of the errors in a store."""
        return folder / "linear_response.json"

    def write(self, folder: Path) -> None:
        """Write the errors into a store."""
        write_text(self.path(folder), json.dumps({"errors": list(self.errors)}) + "\n")

    @classmethod
    def read(cls, folder: Path, n: int, tolerance: float) -> ApproximationError:
        """The errors of `n` models that were written into a store; MissingDataError or CorruptFileError without."""
        path = cls.path(folder)
        if not path.is_file():
            raise MissingDataError(
                f"{path} does not exist: measure the error of linear response by `python train.py shadows`"
            )
        try:
            errors = [float(error) for error in parse_json(path.read_text(encoding="utf-8"))["errors"]]
            if len(errors) != n:
                raise ValueError(f"{len(errors)} errors instead of {n}")
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptFileError(
                f"{path} is damaged ({error}): delete it, and the errors are measured again"
            ) from error
        return cls(errors, tolerance)


#: Memory in bytes of the models that are computed together; after a kill, these are computed again.
_TOGETHER_BYTES = 192 * 2**20
#: Settings of `GradientDescent` that linear response supports.
_KNOWN_SETTINGS = {"steps", "lr", "momentum"}
#: Folder in a store of the exact models of the sample.
_SAMPLE = "exact_sample"
#: Memory of one model of another network than an MLP, in float32 weights: difference, momentum, gradients and copies.
_COPIES = 6 * 4


@dataclass(frozen=True, eq=False)
class LinearPlan:
    """Shadow models that are approximated, if the error is tolerable; ConfigError for unsupported models.

    MLPs by linear response, other networks from their own images' gradients at `steps` of the training or, without
    these, from some of the fixed images per step.

    `linear`: all models are approximated, and an error beyond the tolerance is refused. `mixed`: the sample is exact,
    and beyond the tolerance all models are.
    """

    exact: ShadowPlan
    response: LinearResponse
    kind: Literal["linear", "mixed"]

    def __post_init__(self) -> None:
        default, wrong = GradientDescent(), []
        for setting in fields(GradientDescent):
            value = getattr(self.exact.descent, setting.name)
            if setting.name not in _KNOWN_SETTINGS and value and value != getattr(default, setting.name):
                wrong.append(f"descent.{setting.name}={value}")
        if self.exact.initialization != "known":
            wrong.append(f"initialization={self.exact.initialization}")
        if wrong:
            raise ConfigError(
                "linear response is for gradient descent on full batches, with momentum or without, from known initial "
                f"weights; got {', '.join(wrong)}: set shadows to exact"
            )
        if self._is_mlp and self.response.steps:
            raise ConfigError(
                f"linear.steps is for networks other than MLPs, whose Hessians are known at every step; got "
                f"{self.response.steps} for a {type(self.exact.network).__name__}: leave linear.steps out"
            )
        if self._is_mlp:
            n_coordinates(self.exact.network, self.exact.fixed.images[0].numel(), self.response.rank)

    @property
    def _is_mlp(self) -> bool:
        """Whether Hessians are computed by the structure of an MLP."""
        return isinstance(self.exact.network, ReleasedMLP)

    @property
    def _samples(self) -> bool:
        """Whether the change of the fixed set's gradient is estimated on some of its images."""
        return not self._is_mlp and not self.response.steps

    @property
    def fixed(self) -> ImageSet:
        return self.exact.fixed

    @property
    def description(self) -> dict[str, object]:
        used = asdict(self.response)
        for newer in ("steps", "rest"):  # stores from before have none
            if not used[newer]:
                used.pop(newer)
        if self._samples:
            used.pop("rank")
        response = {f"shadows.{key}": value for key, value in used.items()}
        return {**self.exact.description, "shadows": self.kind, **response}

    def execution(self) -> Execution:
        return self.exact.execution()

    def sample(self, images: ImageSet) -> ImageSet:
        """The first images, whose models are also trained exactly; ConfigError if there are fewer."""
        if len(images) < self.response.sample:
            raise ConfigError(
                f"linear.sample must be at most the number of shadow models, {len(images)}; got {self.response.sample}"
            )
        return images.subset(torch.arange(self.response.sample))

    def exact_sample(self, folder: Path, images: ImageSet) -> ExactSample | None:
        """The sample that the error of linear response is measured on, once for every store."""
        measure, check = partial(self.measure, folder, images), partial(self.trusted, folder)
        return ExactSample(self.exact, self.sample(images), folder / _SAMPLE, measure, check, self.kind == "mixed")

    def measure(self, folder: Path, images: ImageSet) -> None:
        """Write the errors of linear response into a store, unless they are there, for the images of the whole plan."""
        if ApproximationError.path(folder).is_file():
            return
        sample = self.sample(images)
        exact = self._exact_sample(folder, sample)
        linear = torch.cat(list(self._respond([sample])))
        errors = (linear - exact).norm(dim=1) / exact.norm(dim=1)
        ApproximationError(errors.tolist(), self.response.tolerance).write(folder)

    def measured(self, folder: Path) -> ApproximationError:
        """The errors that `measure` wrote into a store; raises the errors of `ApproximationError.read`."""
        return ApproximationError.read(folder, self.response.sample, self.response.tolerance)

    def trusted(self, folder: Path) -> bool:
        """Whether linear response is used, else exact training; ConfigError where `kind` does not allow this."""
        measured = self.measured(folder)
        if not measured.is_tolerable and self.kind == "linear":
            raise ConfigError(
                f"{measured.sentence}: raise linear.rank or linear.hessian_images, or set shadows to mixed or exact"
            )
        return measured.is_tolerable

    def facts(self, folder: Path, n: int) -> dict[str, float | int | str]:
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

    def notes(self, folder: Path, n: int) -> tuple[str, ...]:
        linear, how = self.facts(folder, n)["n_linear"], f"All {n} shadow models were trained exactly"
        if linear:
            n_fixed = len(self.fixed)
            some = math.ceil(n_fixed / n_samples(n_fixed, self.response.hessian_images))
            means = f"from {some} of the {n_fixed} fixed images per step"
            how = f"{linear} of the {n} shadow models were made {means if self._samples else 'by linear response'}"
        return (f"{how}: {self.measured(folder).sentence}.",)

    def train_shards(self, store: ShadowStore, shards: Sequence[int], images: ImageSet) -> Iterator[int]:
        """See `Plan`; the store holds measured errors."""
        if not self.trusted(store.folder):
            yield from self.exact.train_shards(store, shards, images)
            return
        exact = self._exact_sample(store.folder, self.sample(images)) if self.kind == "mixed" else torch.empty(0)
        known = self.exact.known
        one = bytes_per_model(known, self.response.rank) if self._is_mlp else _COPIES * known.n_parameters
        together = max(1, _TOGETHER_BYTES // (one * store.shard_size))
        for start in range(0, len(shards), together):
            some = shards[start : start + together]
            members = [store.members(shard, len(images)) for shard in some]
            groups = [images.subset(torch.tensor(list(each))) for each in members]
            for shard, each, own, found in zip(some, members, groups, self._respond(groups), strict=True):
                kept = exact[each.start : each.stop]
                store.write(shard, torch.cat([kept, found[len(kept) :]]), own)
                yield shard

    def _exact_sample(self, folder: Path, sample: ImageSet) -> Tensor:
        there = folder / _SAMPLE
        store = ShadowStore.open(there, self.exact.description)
        if store is None:
            raise MissingDataError(
                f"{there} holds no exact models to measure linear response by: train them by `python train.py shadows`"
            )
        return store.read(sample)

    def _respond(self, groups: Sequence[ImageSet]) -> Iterator[Tensor]:
        device = self.exact.device
        tensors = [(own.pixels().to(device), own.labels.to(device)) for own in groups]
        if self._is_mlp:
            initial = self.exact.initial_weights().to(device)
            return (found.cpu() for found in respond(self.exact.known, initial, tensors, self.response))
        if not self._samples:
            return (self._path_response.differences(*group).cpu() for group in tensors)
        # all groups together share the reference's gradients
        images, labels = (torch.cat(parts) for parts in zip(*tensors, strict=True))
        found = respond_by_samples(self.exact.known, self._path, images, labels, self.response.hessian_images)
        return iter(found.cpu().split([len(own) for own in groups]))

    @cached_property
    def _path_response(self) -> PathResponse:
        own = self.response
        settings = ResponseSettings(own.rank, own.steps, own.hessian_images, own.rest)
        return PathResponse.of(self.exact.known, self.exact.initial_weights().to(self.exact.device), settings)

    @cached_property
    def _path(self) -> Tensor:
        """Weights of the reference before each step, `(t, p)`."""
        known, initial = self.exact.known, self.exact.initial_weights().to(self.exact.device)
        with full_precision():
            return torch.stack(list(full_batch_path(known, initial)))
