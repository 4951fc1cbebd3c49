"""Reconstruction by Newton's method in image space: few trainings, with the derivative of the weights in the image.

`PathResponse` predicts the difference of a model from its image, to first order, and can be differentiated in it. A
training on a guess shows the error of the prediction there. Every round finds the image whose prediction, corrected by
that error, comes nearest to the released difference, and trains on it. Between trainings the error is taken for linear
in the prediction, as earlier trainings show it (Broyden's method).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cache, partial

import torch
from torch import Tensor

from lit_recon.attacks.released.base import Advance, Background, ReconstructedTargets, Reconstructor, digest
from lit_recon.attacks.released.retraining.repetition import (
    Training,
    distances_of,
    repeatable,
    training_of,
    why_undetermined,
)
from lit_recon.attacks.released.retraining.state import read_state, write_state
from lit_recon.attacks.shadow.path_response import PathResponse, ResponseSettings
from lit_recon.attacks.shadow.training import full_precision
from lit_recon.errors import ConfigError, ShapeError
from lit_recon.solving import StepwiseLBFGS

#: Pairs that L-BFGS keeps.
_HISTORY = 50
#: Share of the evaluations of a search after which the label is chosen.
_CHOOSING = 0.2
#: Ridge of the error's linear part, relative to its mean diagonal.
_RIDGE = 1e-6
#: Least relative decrease of the best loss in this many evaluations; searches that have less end.
_DECREASE, _EVALUATIONS = 0.02, 20


@dataclass(frozen=True, eq=False)
class Rounds:
    """All trainings so far."""

    images: Tensor  # that were trained on, `(m, k, c, h, w)`
    labels: Tensor  # int64 `(m,)`
    predicted: Tensor  # differences that `PathResponse` predicts, `(m, k, p)`
    trained: Tensor  # differences of the trained models, `(m, k, p)`
    distances: Tensor  # of the latter from the released ones, relative to their norms, float64 `(m, k)`

    def __post_init__(self) -> None:
        m, k = self.images.shape[:2]
        differences = self.predicted.shape == self.trained.shape == (m, k, self.trained.shape[-1])
        if self.images.dim() != 5 or self.labels.shape != (m,) or self.distances.shape != (m, k) or not differences:
            raise ValueError("images must be (m, k, c, h, w), labels (m,), differences (m, k, p) and distances (m, k)")

    @property
    def n(self) -> int:
        """Number `k` of rounds."""
        return self.distances.shape[1]

    @property
    def best(self) -> Tensor:
        """Round of the nearest guess of every target, `(m,)`."""
        return self.distances.argmin(dim=1)

    def of_best(self, values: Tensor) -> Tensor:
        """Of `(m, k, ...)`, those of the nearest guess, `(m, ...)`."""
        return values[torch.arange(len(values)), self.best]

    def at(self, which: Tensor) -> Rounds:
        """Of the targets `which`, bool `(m,)`."""
        return Rounds(*(getattr(self, field.name)[which] for field in fields(self)))

    def extended(self, which: Tensor, *found: Tensor) -> Rounds:
        """With another round for the targets `which`, its fields but labels; others repeat their nearest guess."""
        joined = []
        for old, new in zip((self.images, self.predicted, self.trained, self.distances), found, strict=True):
            last = self.of_best(old)
            last[which] = new
            joined.append(torch.cat([old, last[:, None]], dim=1))
        return Rounds(joined[0], self.labels, *joined[1:])


@dataclass(frozen=True, eq=False)
class Expected:
    """What a training is expected to leave over, given the prediction for its image: linear in the prediction."""

    predicted: Tensor  # at the nearest guess, `(m, p)`; 0 without one
    left: Tensor  # trained minus released difference there, `(m, p)`; minus the released one without a guess
    moves: Tensor  # predictions at all guesses minus `predicted`, `(m, k, p)`
    changes: Tensor  # what the error of the prediction changes by, per product with a move, `(m, k, p)`
    scale: Tensor  # norm of the released difference, `(m,)`

    @classmethod
    def of(cls, released: Tensor, rounds: Rounds | None, device: str) -> Expected:
        """From the trainings so far, for released differences `(m, p)`."""
        scale = released.norm(dim=1)
        if rounds is None:
            none = released.new_zeros(len(released), 0, released.shape[1])
            parts = (torch.zeros_like(released), -released, none, none, scale)
        else:
            predicted, trained = rounds.of_best(rounds.predicted), rounds.of_best(rounds.trained)
            moves = rounds.predicted - predicted[:, None]
            normal = (moves @ moves.mT).double()
            ridge = _RIDGE * normal.diagonal(dim1=1, dim2=2).mean(dim=1) + torch.finfo(normal.dtype).tiny
            normal += ridge[:, None, None] * torch.eye(rounds.n).to(normal)
            errors = rounds.trained - trained[:, None] - moves
            changes = torch.linalg.solve(normal, errors.double()).to(errors)
            parts = (predicted, trained - released, moves, changes, scale)
        return cls(*(part.to(device) for part in parts))

    def __call__(self, predicted: Tensor) -> Tensor:
        """Squared norms `(m,)` of what is left for predictions `(m, p)`, relative to those of the released ones."""
        move = predicted - self.predicted
        along = torch.einsum("mkp,mp->mk", self.moves, move)
        left = self.left + move + torch.einsum("mk,mkp->mp", along, self.changes)
        return (left / self.scale[:, None]).square().sum(dim=1)


@dataclass
class NewtonRetraining(Reconstructor):
    """Find images on which the training gives the released weights, by a prediction that can be differentiated.

    For networks of any kind. It learns nothing from shadow models. The label is the one with which the first search
    comes nearest. Nothing is certified where the network has no more weights than an image has pixels, or where some
    pixels do not enter it, such as behind strides: other images then give the released weights, too.

    Args:
        trainings: most trainings per target; 0: the first search alone.
        evaluations: most evaluations of the prediction per search.
        response: accuracy of the prediction.
        tolerance: relative distance of weights at which a target is done; float32 leaves 1e-5 to 1e-3.
        certain: relative distance below which an image counts as certified.
        together: targets at a time; memory grows with it.

    Source: ours, with [Broyden1965] for what earlier trainings show.
    """

    trainings: int = 12
    evaluations: int = 150
    response: ResponseSettings = field(default_factory=ResponseSettings)
    tolerance: float = 2e-3
    certain: float = 1e-2
    together: int = 4

    needs_background = True

    def __post_init__(self) -> None:
        if self.trainings < 0 or min(self.evaluations, self.together) < 1:
            raise ConfigError(f"trainings must be 0 or more, evaluations and together at least 1; got {self}")
        if not 0 < self.tolerance <= self.certain < 1:
            raise ConfigError(f"tolerance and certain must fulfil 0 < tolerance <= certain < 1; got {self}")

    def prepare(self, background: Background) -> None:
        self.plan = repeatable(background.plan, "NewtonRetraining")
        self.folder, self.announce = background.state, background.announce
        self.undetermined = why_undetermined(self.plan)

    def fit(self, differences: Tensor, images: Tensor, labels: Tensor, n_classes: int) -> None:
        self.n_classes = n_classes

    @property
    def notes(self) -> tuple[str, ...]:
        if not self.trainings:
            return ("Every image is that whose predicted weights come nearest to the released ones; none was checked.",)
        how = (
            f"Every image was found by at most {self.trainings} trainings, between which the weights are predicted to "
            "first order; it is certified if the trained weights differ from the released ones by at most "
            f"{self.certain:g} of the image's effect on the weights."
        )
        return (how, *([f"No image is certified: {self.undetermined}"] if self.undetermined else []))

    def reconstruct(self, differences: Tensor) -> ReconstructedTargets:
        p = self.plan.known.n_parameters
        norms = differences.norm(dim=-1)
        if differences.dim() != 2 or differences.shape[1] != p or not bool((norms.isfinite() & (norms > 0)).all()):
            raise ShapeError(
                f"differences must be finite and not zero, (m, {p}) of models of this network; got "
                f"{tuple(differences.shape)} with norms from {norms.min():.3g} to {norms.max():.3g}"
            )
        advance = self.announce(len(differences) * self.trainings, "search", "trainings")
        initial = self.plan.initial_weights().to(self.plan.device)
        # it takes minutes, and searches that were finished before have no use for it
        response = cache(partial(PathResponse.of, self.plan.known, initial, self.response))
        train = training_of(self.plan, self.plan.fixed.pixels().shape[1:])
        found = [self._found(response, train, some, advance) for some in differences.split(self.together)]
        images, labels, distances = (torch.cat(parts) for parts in zip(*found, strict=True))
        certified = (distances <= self.certain) & (not self.undetermined)
        return ReconstructedTargets(images, labels, distances, certified if self.trainings else None)

    def _found(
        self, response: Callable[[], PathResponse], train: Training, released: Tensor, advance: Advance
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Images `(m, c, h, w)`, labels `(m,)` and distances `(m,)` of released differences `(m, p)`."""
        path = None if self.folder is None else self.folder / f"newton_{digest(f'{self}', released)}.safetensors"
        rounds = None if path is None or not path.is_file() else read_state(path, Rounds)
        if rounds is None:
            images, labels, misfits = self._first(response(), released)
            if not self.trainings:
                return images, labels, misfits
            first = self._trained(response(), train, released, images, labels)
            rounds = Rounds(first[0][:, None], labels, *(part[:, None] for part in first[1:]))
            advance(len(released))
        else:
            advance(len(released) * rounds.n)
        while True:
            if path is not None:
                write_state(path, rounds)
            starts, distances = rounds.of_best(rounds.images), rounds.distances.min(dim=1).values
            going = distances > self.tolerance
            if rounds.n >= self.trainings or not going.any():
                advance(len(released) * (self.trainings - rounds.n))
                return starts, rounds.labels, distances
            left, labels, wanted = rounds.at(going), rounds.labels[going], released[going]
            expected = Expected.of(wanted, left, self.plan.device)
            images, _ = self._search(response(), expected, starts[going], labels, self.evaluations)
            careful = 0.5 ** (left.n - 1 - left.best)  # for every training since that came no nearer
            images = starts[going] + (images - starts[going]) * careful[:, None, None, None]
            rounds = rounds.extended(going, *self._trained(response(), train, wanted, images, labels))
            advance(len(released))

    def _trained(
        self, response: PathResponse, train: Training, released: Tensor, images: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """A round: its images, what is predicted and trained for them, and distances."""
        predicted = response.differences(images.to(self.plan.device), labels.to(self.plan.device)).cpu()
        trained = train(images.flatten(1), labels)
        return images, predicted, trained, distances_of(trained, released)

    def _first(self, response: PathResponse, released: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The first search: images `(m, c, h, w)`, labels `(m,)` and relative misfits `(m,)`."""
        few = max(1, round(_CHOOSING * self.evaluations))
        mean = self.plan.fixed.pixels().mean(dim=0).expand(len(released), -1, -1, -1)
        expected, tried = Expected.of(released, None, self.plan.device), []
        for label in range(self.n_classes):
            labels = torch.full((len(released),), label)
            tried.append(self._search(response, expected, mean, labels, few))
        labels = torch.stack([misfits for _, misfits in tried]).argmin(dim=0)
        starts = torch.stack([images for images, _ in tried])[labels, torch.arange(len(released))]
        images, misfits = self._search(response, expected, starts, labels, self.evaluations)
        return images, labels, misfits

    def _search(
        self, response: PathResponse, expected: Expected, starts: Tensor, labels: Tensor, evaluations: int
    ) -> tuple[Tensor, Tensor]:
        """Images `(m, c, h, w)` for which least is expected to be left, and its norms `(m,)`."""
        images = starts.to(self.plan.device, copy=True)
        labels = labels.to(self.plan.device)
        variables = list(images.unbind())  # searches move these views
        searches = [StepwiseLBFGS(variable, _HISTORY) for variable in variables]
        best, least = images.clone(), images.new_full((len(images),), torch.inf)
        before = least.clone()
        for evaluation in range(1, evaluations + 1):
            with torch.enable_grad(), full_precision():
                places = images.clone().requires_grad_(True)
                losses = expected(response(places, labels))
                (slopes,) = torch.autograd.grad(losses.sum(), places)
            losses = losses.detach()
            closer = losses < least
            best[closer], least[closer] = images[closer], losses[closer]
            if evaluation % _EVALUATIONS == 0:
                if not bool((least < (1 - _DECREASE) * before).any()):
                    break
                before = least.clone()
            for variable, slope, search, loss in zip(variables, slopes, searches, losses.tolist(), strict=True):
                variable.grad = slope
                search.told(loss)
        best = best.clamp(0, 1)
        with torch.no_grad(), full_precision():
            least = expected(response(best, labels))  # steps are not bounded, images are
        return best.cpu(), least.sqrt().double().cpu()
