"""Records passed between packages: client updates, observations of an attacker, reconstructions.

Shapes: `n` images in a batch, `c h w` image axes, `k` classes, `r` restarts. Images are float tensors in [0, 1] at
every interface; networks normalize inside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lit_recon.errors import ShapeError

#: Gradient or weight difference by parameter name, in the order of `model.named_parameters()`.
Update = dict[str, Tensor]

#: Mean loss of logits `(n, k)` and labels: classes `(n,)`, or probabilities `(n, k)` where the loss takes them.
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Normalization:
    """Per-channel mean and standard deviation of [0, 1] pixels; networks compute `(x - mean) / std` inside."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std) or not self.mean:
            raise ShapeError(
                f"normalization needs one mean and one std per channel; got {len(self.mean)} and {len(self.std)}"
            )
        if min(self.std) <= 0:
            raise ShapeError(f"normalization needs standard deviations above 0; got {self.std}")

    def tensors(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and std, each `(c, 1, 1)`, in the dtype and on the device of `like`."""
        mean, std = (like.new_tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
        return mean, std


class LayerStatistics(NamedTuple):
    """Per-channel mean and biased variance of a BatchNorm layer's input over batch and space, each `(f,)`."""

    mean: Tensor
    var: Tensor


#: Statistics by the name of the BatchNorm module.
BatchStatistics = dict[str, LayerStatistics]
#: Whether BatchNorm layers use running (`eval`) or batch statistics (`train`).
BatchNormMode = Literal["eval", "train"]
#: How a computed update is differentiable in the images: not at all, by plain autograd, or by `torch.func`, inside its
#: transforms and under a compiler.
Differentiable = Literal["no", "autograd", "functional"]


class Weights(NamedTuple):
    """Parameters and buffers of a model by name."""

    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]

    @staticmethod
    def of(model: nn.Module) -> Weights:
        """Those of a model, without its graph."""
        parameters = {name: value.detach() for name, value in model.named_parameters()}
        return Weights(parameters, dict(model.named_buffers()))


class Batch(NamedTuple):
    """A client's batch.

    Attributes:
        images: `(n, c, h, w)` in [0, 1].
        labels: classes `(n,)` or probabilities `(n, k)`.
        masks: buffers that differ between examples, by name, each `(n, ...)`; they replace the model's.
    """

    images: Tensor
    labels: Tensor
    masks: Mapping[str, Tensor] = {}

    def examples(self, start: int, stop: int) -> Batch:
        """Examples `start` to `stop - 1`."""
        masks = {name: mask[start:stop] for name, mask in self.masks.items()}
        return Batch(self.images[start:stop], self.labels[start:stop], masks)

    def shares(self, clients: int) -> list[Batch]:
        """Equal shares of the examples, in order, one per client; a `ShapeError` if there are none."""
        size, rest = divmod(len(self.images), clients)
        if size == 0 or rest:
            raise ShapeError(
                f"{len(self.images)} images cannot be shared equally among {clients} clients: "
                f"take a multiple of {clients} images"
            )
        return [self.examples(i * size, (i + 1) * size) for i in range(clients)]


class ForwardOperator(Protocol):
    """The client's public update rule."""

    @property
    def batch_norm(self) -> BatchNormMode: ...

    @property
    def parts(self) -> int:
        """Equal parts of the images, in order, that clients or their steps use one by one."""
        ...

    @property
    def additive(self) -> bool:
        """Whether the update is the mean of those of the single images, whichever others there are."""
        ...

    def __call__(self, weights: Weights, batch: Batch, differentiable: Differentiable = "no") -> Update:
        """The update that a client with these weights and this batch releases."""
        ...

    def with_statistics(
        self, weights: Weights, batch: Batch, differentiable: Differentiable = "no"
    ) -> tuple[Update, BatchStatistics]:
        """The update, and the statistics of every BatchNorm layer's input, from one forward pass."""
        ...

    def statistics(self, weights: Weights, batch: Batch) -> BatchStatistics:
        """These statistics alone, differentiable in the images."""
        ...


#: Distributions of noise on an update.
NoiseFamily = Literal["gaussian", "laplace"]


class Noise(NamedTuple):
    """Independent noise of mean 0, equally distributed on all coordinates that a client releases.

    Attributes:
        family: of the distribution.
        scale: above 0; standard deviation of the normal distribution, mean absolute value of the Laplace distribution.
    """

    family: NoiseFamily
    scale: float

    @property
    def std(self) -> float:
        """Standard deviation."""
        return self.scale * (1.0 if self.family == "gaussian" else 2**0.5)


class SimulatedDefense(Protocol):
    """The part of a client's defense that an attacker can simulate; see `lit_recon.defenses.Defense`."""

    @property
    def stages(self) -> Sequence[int]:
        """Where it acts: 1 the batch, 2 gradients of single examples, 3 the update."""
        ...

    def simulate_buffers(
        self, buffers: Mapping[str, Tensor], observed: Update, n_examples: int
    ) -> Mapping[str, Tensor]:
        """The model's buffers for the attacker's simulation, given the update `observed`."""
        ...

    def simulate_per_example(self, gradients: Update) -> Update:
        """The defense applied to per-example gradients of a candidate, each `(n, ...)`."""
        ...

    def simulate(self, candidate: Update, observed: Update) -> Update:
        """The defense applied to a candidate's update, with masks and scales estimated from `observed`."""
        ...

    def censored(self, observed: Update) -> Update:
        """Masks of entries of `observed` that only bound those before the defense."""
        ...

    def largest_hidden(self, observed: Update) -> Mapping[str, float]:
        """By tensor the largest magnitude, in units of `observed`, of what may have been released as zero."""
        ...

    def released_noise(self, n_examples: int) -> Noise | None:
        """The noise in the release, None without noise; a `ConfigError` if it is of another kind."""
        ...


@dataclass(frozen=True)
class Knowledge:
    """The attacker's knowledge besides the public model and the update.

    Attributes:
        labels: the true labels are given, in the client's order, which tells its mini-batches; otherwise the attack has
            to recover them.
        batch_norm: `batch`: the statistics of the client's own batch at every BatchNorm layer are known;
            `running`: only the server's running statistics; `none`: neither.
        defense: the client's defense and its strength are known, so that the attack can simulate it.
    """

    labels: bool = False
    batch_norm: Literal["batch", "running", "none"] = "running"
    defense: bool = False


@dataclass(frozen=True)
class ClientUpdate:
    """A client's release: its update, the batch size, and BatchNorm statistics if it shares them."""

    update: Update
    n_examples: int
    batch_statistics: BatchStatistics | None = None


@dataclass(frozen=True)
class Observation:
    """All that an attack may use. There is no field for the true images.

    Attributes:
        model: the public architecture; read its structure, never its own weights.
        parameters, buffers: the public weights and buffers at which the client computed its update.
        operator: the client's update rule, to be applied to candidates.
        n_examples: batch size of the client.
        image_shape: `(c, h, w)`.
        n_classes: `k`.
        normalization: channel statistics that the model applies to [0, 1] pixels.
        knowledge: what else is known; a field below that it excludes is None.
        labels: true labels `(n,)`, only if `knowledge.labels`.
        batch_statistics: of the client's batch, only if `knowledge.batch_norm == "batch"`.
        defense: the attacker's simulation of the client's defense, only if `knowledge.defense`.
        loss: the client's training loss.
    """

    model: nn.Module
    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    operator: ForwardOperator
    update: Update
    n_examples: int
    image_shape: tuple[int, int, int]
    n_classes: int
    normalization: Normalization
    knowledge: Knowledge = field(default_factory=Knowledge)
    labels: Tensor | None = None
    batch_statistics: BatchStatistics | None = None
    defense: SimulatedDefense | None = None
    loss: Loss = cross_entropy

    @property
    def weights(self) -> Weights:
        """The public parameters and buffers, as the operator takes them."""
        return Weights(self.parameters, self.buffers)

    @property
    def like(self) -> Tensor:
        """A tensor of the update, for its dtype and device."""
        return next(iter(self.update.values()))

    def __post_init__(self) -> None:
        if self.n_examples < 1:
            raise ShapeError(f"an observation needs at least one example; got n_examples={self.n_examples}")
        if set(self.update) != set(self.parameters):
            odd = sorted(set(self.update) ^ set(self.parameters))
            raise ShapeError(f"update and parameters must name the same tensors; they differ in {odd[:5]}")
        for name, value in self.update.items():
            shape = self.parameters[name].shape
            if value.shape != shape:
                raise ShapeError(
                    f"update[{name!r}] must have the parameter's shape {tuple(shape)}; got {tuple(value.shape)}"
                )
            if not torch.isfinite(value).all():
                raise ShapeError(f"update[{name!r}] holds NaN or infinite values; the client's gradient overflowed")
        if self.knowledge.labels != (self.labels is not None):
            raise ShapeError("labels must be given exactly when knowledge.labels is true")
        if self.knowledge.defense != (self.defense is not None):
            raise ShapeError("the defense must be given exactly when knowledge.defense is true")
        if (self.knowledge.batch_norm == "batch") != (self.batch_statistics is not None):
            raise ShapeError("batch_statistics must be given exactly when knowledge.batch_norm is 'batch'")


@dataclass(frozen=True)
class Reconstruction:
    """Result of an attack, in arbitrary order: metrics match it to the true images.

    Attributes:
        images: `(n, c, h, w)` in [0, 1].
        labels: recovered or given labels `(n,)`.
        loss: the attack's loss of the returned images; restarts are selected by it alone.
        features: `(r, d)` of unit norm in arbitrary order, where the attack recovers the inputs of a wide layer.
        trace: named curves of equal length, e.g. `step`, `loss`; for logs and reports.
        notes: fall-backs and assumptions, for reports.
        certified: `(n,)` bool: whether the attack knows that an image is the true one; None: it never knows.
        final: images that are not certified are not wrong, but not determined: no other start would find better ones.
    """

    images: Tensor
    labels: Tensor
    loss: float
    trace: dict[str, list[float]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    features: Tensor | None = None
    certified: Tensor | None = None
    final: bool = False

    @property
    def n_certified(self) -> int:
        """Number of certified images."""
        return 0 if self.certified is None else int(self.certified.sum())

    def ordered(self, order: Tensor) -> Reconstruction:
        """The same with the images in another order `(n,)`."""
        certified = None if self.certified is None else self.certified[order]
        return replace(self, images=self.images[order], labels=self.labels[order], certified=certified)
