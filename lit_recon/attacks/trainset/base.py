"""Released models as attackers see them, and the interface of attacks on their whole training sets."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lit_recon.attacks.base import AttackRun, SimpleState, Way
from lit_recon.attacks.trainset.training import Task, Training, Weights
from lit_recon.errors import ShapeError, ThreatModelError, UnsupportedModelError
from lit_recon.records import Reconstruction


@dataclass(frozen=True, eq=False)
class ReleasedModel:
    """A released model and what is known of its training. There is no field for the true images.

    Attributes:
        model: the architecture; takes images `(n, c, h, w)` in [0, 1] and gives outputs `(n, k)`, `k` = 1 but for
            `multiclass`. Where it is in training mode, a copy in evaluation mode takes its place: attacks simulate a
            training without dropout.
        weights: the released ones, by parameter name, all of one dtype, in which attacks compute.
        task: loss and labels.
        image_shape: `(c, h, w)`.
        n_classes: number of different labels, 2 unless the task is `multiclass`.
        mean: public image `(c, h, w)`, such as the mean of other images of that kind.
        n_examples: number of training images.
        weight_decay: of the training; None: that of `training`, or unknown.
        loss: the mean training loss of the released weights, as its owner reports it; None: unknown.
        training: the whole procedure, where it is known.
        start: the weights at which the training began, where they are known.
        known_images, known_labels: training images that are known, `(j, c, h, w)` and `(j,)`.

    Raises:
        UnsupportedModelError: the weights are not those of the network, or some of them are frozen: attacks explain and
            repeat trainings of all weights.
        ThreatModelError: the weight decay is not that of `training`.
        ShapeError: a weight, the start or the mean image has the wrong shape, or is not finite; images and labels that
            are known are not as many, or are all training images.
    """

    model: nn.Module
    weights: Weights
    task: Task
    image_shape: tuple[int, int, int]
    n_classes: int
    mean: Tensor
    n_examples: int
    weight_decay: float | None = None
    loss: float | None = None
    training: Training | None = None
    start: Weights | None = None
    known_images: Tensor | None = None
    known_labels: Tensor | None = None

    def __post_init__(self) -> None:
        if any(module.training for module in self.model.modules()):
            object.__setattr__(self, "model", copy.deepcopy(self.model).eval())
        frozen = [name for name, parameter in self.model.named_parameters() if not parameter.requires_grad]
        if frozen:
            raise UnsupportedModelError(
                f"attacks on training sets need networks whose weights are all trained; got requires_grad=False for "
                f"{frozen[:3]}: set it to True, if they were trained"
            )
        wanted = {name: tuple(parameter.shape) for name, parameter in self.model.named_parameters()}
        for field, what in (("weights", "the released weights"), ("start", "the start")):
            weights: Weights | None = getattr(self, field)
            if weights is None:
                continue
            if weights.keys() != wanted.keys():
                odd = sorted(weights.keys() ^ wanted.keys())
                raise UnsupportedModelError(
                    f"{what} must have the parameters of the network {type(self.model).__name__}; they differ in "
                    f"{odd[:5]}: give the architecture that was trained"
                )
            for name, weight in weights.items():
                if tuple(weight.shape) != wanted[name]:
                    raise ShapeError(
                        f"{what}: {name} must be {wanted[name]} in this network; got {tuple(weight.shape)}"
                    )
                if not torch.isfinite(weight).all():
                    raise ShapeError(f"{what}: {name} holds NaN or infinite values; such a model cannot be attacked")
            # in the order of the network, as files may have another: attacks join them to vectors
            object.__setattr__(self, field, {name: weights[name] for name in wanted})
        if tuple(self.mean.shape) != self.image_shape:
            raise ShapeError(f"the mean image must be {self.image_shape}; got {tuple(self.mean.shape)}")
        if self.training is not None:
            own = self.training.weight_decay
            if self.weight_decay not in (None, own):
                raise ThreatModelError(
                    f"weight_decay must be that of the training, {own:g}; got {self.weight_decay:g}: leave it out"
                )
            object.__setattr__(self, "weight_decay", own)
        if self.n_examples < 1:
            raise ShapeError(f"a training set needs at least one image; got n_examples={self.n_examples}")
        if (self.known_labels is None) != (self.known_images is None):
            raise ShapeError("known_images and known_labels must be given together")
        if self.known_images is not None and self.known_labels is not None:
            n_labels, shape = len(self.known_labels), tuple(self.known_images.shape)
            if shape != (n_labels, *self.image_shape) or n_labels >= self.n_examples:
                raise ShapeError(
                    f"known_images must be (j, {', '.join(map(str, self.image_shape))}) with j labels, j below "
                    f"n_examples={self.n_examples}; got {shape} and {n_labels} labels: give one label for each image, "
                    "and leave at least one image unknown"
                )

    @property
    def n_known(self) -> int:
        """Number of known training images."""
        return 0 if self.known_images is None else len(self.known_images)

    @property
    def n_unknown(self) -> int:
        """Number of training images that are to be found."""
        return self.n_examples - self.n_known

    def with_known(self, images: Tensor, labels: Tensor, repeats: int = 1) -> tuple[Tensor, Tensor]:
        """Known training images, each `repeats` times, followed by these in place of the unknown ones; all labels."""
        if self.known_images is None or self.known_labels is None:
            return images, labels
        known, known_labels = self.known_images.to(images), self.known_labels.to(labels)
        return (
            torch.cat([known.repeat(repeats, 1, 1, 1), images]),
            torch.cat([known_labels.repeat(repeats), labels]),
        )

    def repeats_of_known(self, m: int) -> int:
        """How often each known image stands beside `m` candidates so that a mean over all is that of the training.

        ThreatModelError if `m` is no multiple of the number of unknown images, so that the shares cannot be right.
        """
        repeats, left = divmod(m, self.n_unknown)
        if self.n_known and (left or not repeats):
            raise ThreatModelError(
                f"beside known images, the candidates must be as many as the {self.n_unknown} unknown ones of the "
                f"{self.n_examples} training images, or a multiple; got {m}: give {self.n_unknown * max(1, repeats)}"
            )
        return max(1, repeats)

    @property
    def like(self) -> Tensor:
        """A released weight, for its dtype and device."""
        return next(iter(self.weights.values()))

    def outputs(self, weights: Mapping[str, Tensor], images: Tensor) -> Tensor:
        """Outputs `(n, k)` of the network with these weights."""
        outputs: Tensor = functional_call(self.model, dict(weights), (images,))
        return outputs


@dataclass(frozen=True, eq=False)
class Candidates:
    """Images and labels at which an attack on a released model starts.

    Attributes:
        seen: the released model.
        images: `(m, c, h, w)`, not necessarily in [0, 1].
        labels: `(m,)` int64.
        seed: of everything else that the attack draws.
    """

    seen: ReleasedModel
    images: Tensor
    labels: Tensor
    seed: int = 0

    def __post_init__(self) -> None:
        m, shape = len(self.labels), self.seen.image_shape
        if m < 1 or tuple(self.images.shape) != (m, *shape):
            raise ShapeError(
                f"a start needs one image {shape} for each of its labels; got images {tuple(self.images.shape)} and "
                f"{m} labels: give as many images as labels, of the network's shape"
            )
        if not 0 <= int(self.labels.min()) <= int(self.labels.max()) < self.seen.n_classes:
            raise ShapeError(f"labels must be 0 to {self.seen.n_classes - 1}; got up to {int(self.labels.max())}")

    @property
    def n_examples(self) -> int:
        """Number of candidates `m`."""
        return len(self.labels)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        return self.seen.image_shape

    @property
    def like(self) -> Tensor:
        return self.seen.like


class TrainsetAttack(ABC):
    """An attack on the training set of a released model, which improves candidates step by step.

    Subclasses implement `check`, `init`, `step` and `result`, and set `steps`. Drivers save and restore the state.
    Attacks see candidates and released model only: what they return must not depend on anything else.
    """

    steps: int

    @abstractmethod
    def check(self, start: Candidates) -> None:
        """Raise a ThreatModelError or UnsupportedModelError that names an assumption which does not hold."""

    @abstractmethod
    def init(self, start: Candidates) -> SimpleState:
        """The state before the first step, with `start` as its only observation; equal for equal candidates."""

    @abstractmethod
    def step(self, state: SimpleState) -> None:
        """One step, in place; ends with `state.note([loss], ...)`."""

    @abstractmethod
    def result(self, state: SimpleState) -> Reconstruction:
        """The candidates, with the attack's loss, which settings and restarts are selected by."""

    @final
    def begin(self, observations: Sequence[Candidates], execution: Way | None = None) -> AttackRun:
        """Check one set of candidates and set the attack up on it."""
        [start] = observations
        self.check(start)
        state = self.init(start)

        def advance() -> None:
            self.step(state)
            state.step += 1

        return AttackRun(observations, lambda: [self.result(state)], self.steps, state, advance)

    @final
    def __call__(self, start: Candidates) -> Reconstruction:
        """The reconstruction from these candidates."""
        return self.begin([start]).finish()[0]


#: Factors on all weights between which the degree of homogeneity must not change, and by how much it may.
_SCALES, _DEGREE_TOLERANCE = (0.5, 2.0), 1e-3


@torch.no_grad()
def homogeneity(seen: ReleasedModel) -> float:
    """The degree `L` of a network whose outputs grow by `c ** L` if all weights are multiplied by `c`.

    UnsupportedModelError if there is no such degree, as with biases beyond the first layer or with BatchNorm.
    """
    probes = torch.rand(8, *seen.image_shape, generator=torch.Generator().manual_seed(0)).to(seen.like)
    at_one = seen.outputs(seen.weights, probes)
    degrees = []
    for scale in _SCALES:
        scaled = seen.outputs({name: scale * weight for name, weight in seen.weights.items()}, probes)
        ratio = (scaled * at_one).sum() / at_one.square().sum()
        degree = float(ratio.abs().log() / math.log(scale))
        if ratio <= 0 or float((scaled - ratio * at_one).norm()) > _DEGREE_TOLERANCE * float(scaled.norm()):
            degree = math.nan
        degrees.append(degree)
    if not abs(degrees[0] - degrees[1]) <= _DEGREE_TOLERANCE * abs(degrees[1]):
        raise UnsupportedModelError(
            f"the condition of stationarity holds for homogeneous networks, whose outputs are multiplied by a power of "
            f"c if all weights are multiplied by c; those of this {type(seen.model).__name__} are not: train one "
            "without biases beyond the first layer and without BatchNorm, or attack it by its stationarity with weight "
            "decay or by bilevel optimization"
        )
    return degrees[1]
