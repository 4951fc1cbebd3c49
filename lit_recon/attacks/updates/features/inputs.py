"""Inputs of an inner linear layer, exactly, from its gradient alone, and images that have them.

The rows of the layer's gradient are mixtures of the batch's inputs, so their span holds every input. Behind a ReLU
inputs are not negative, and zero wherever the ReLU is inactive, in a third to a half of the coordinates. Among the
vectors of the span without a negative entry they are vertices with far more zeros than the `n - 1` of any vertex:
linear programs find vertices, weights turned towards zeros (Candès, Wakin, Boyd 2008) find those with many, and the
number of zeros tells inputs from mixtures of them. Entries that repeat others, as behind a pooling that enlarges maps,
are left out. No other image, no label and no activation of the layer is used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lit_recon.attacks.updates.gradient_matching.priors import Penalty
from lit_recon.attacks.updates.labels.head import (
    exact,
    find_head,
    labels_of,
    linear_calls,
    mean_gradient,
    require_magnitudes,
)
from lit_recon.clients.aggregate import normalized_apart, one_client
from lit_recon.clients.gradient import pure_copy
from lit_recon.errors import ConfigError, ThreatModelError, UnsupportedModelError
from lit_recon.records import BatchNormMode, Observation, Update
from lit_recon.solving import least_squares

Vector = NDArray[np.float64]

#: Share of the largest entry below which one counts as zero where there is no noise, and units of noise otherwise: of a
#: vertex, which noise moves, and in turn of the vectors fitted to its zeros.
_ZERO, _COARSE = 1e-5, 60.0
_UNITS = (100.0, 30.0, 10.0, 6.0, 6.0)
#: Largest share of the largest entry that noise may reach on a vertex.
_MOST = 0.2
#: Second smallest singular value on the zeros of a vector, over the largest, above which no other one vanishes there.
_ALONE = 0.1
#: Units of noise, and share of the longest column, up to which columns are the same.
_SAME, _ALIKE = 10.0, 1e-6
#: Zeros that an input has beyond those of any vertex, at least.
_EXCESS = 8
#: Weight of an entry that is zero, over that of the largest one.
_SHARPEST = 20.0
#: Coordinates on which a vertex is normalized, which makes programs differ.
_COORDINATES = 3
#: Part of a vector outside the others above which it counts as another input.
_NEW = 1e-3
#: Share of zeros of the layer's inputs below which they are no outputs of a ReLU.
_RECTIFIED = 0.1


@dataclass(frozen=True)
class RecoveredInputs:
    """Inputs of a linear layer, in arbitrary order.

    Attributes:
        layer: its name.
        inputs: `(r, d)` float64, with their scale, or of unit norm; `r` of the batch's `n`.
        zeros: number of entries `(r,)` that are zero in each; entries that repeat others in every input count only
            where they are zero in all of them.
        labels: `(r,)` the class of each, from the head's gradient; None where there is no linear head, or the scale
            of its inputs is not known. Exact where all inputs were found.
        notes: how they were found.
        scaled: whether a gradient of the layer's bias told the scale of the inputs.
    """

    layer: str
    inputs: Tensor
    zeros: Tensor
    labels: Tensor | None
    notes: tuple[str, ...]
    scaled: bool = True


class NonNegativeInputs:
    """Finds the inputs of the first linear layer behind a ReLU by linear programs.

    Args:
        starts: vertices to begin at, at most; fewer where all inputs are found.
        reweightings: further programs from each, towards more zeros.
        seed: of the programs.

    Source: ours. Non-negativity as a term of a search: [Kariyappa2023]; zeros of derivatives, on the other side of the
    layer, as proof: Dimitrov et al., SPEAR, NeurIPS 2024.
    """

    def __init__(self, starts: int = 1000, reweightings: int = 5, seed: int = 0) -> None:
        if starts < 1 or reweightings < 0:
            raise ConfigError(
                f"NonNegativeInputs needs starts >= 1 and reweightings >= 0; got {starts} and {reweightings}"
            )
        self.starts, self.reweightings, self.seed = starts, reweightings, seed

    def __call__(self, observation: Observation) -> RecoveredInputs:
        """The inputs that were found, and their labels.

        Raises:
            UnsupportedModelError: no linear layer behind a ReLU, more images than neurons or inputs, or no input found.
            ThreatModelError: the layer's gradient is zero, noisy, or the result of several steps or of Adam.
        """
        layer = rectified_layer(observation)
        require_magnitudes(observation, "NonNegativeInputs")
        if getattr(one_client(observation.operator)[0], "steps", 1) > 1:
            raise ThreatModelError("inputs are recovered from one gradient, not from the result of several local steps")
        # rates of a released difference may differ between a layer's weight and bias
        released = mean_gradient(observation.update, observation)
        n, gradient = observation.n_examples, exact(released[f"{layer}.weight"])
        _, values, right = torch.linalg.svd(gradient, full_matrices=False)
        if n >= len(values) or float(values[n - 1]) <= 1e-6 * float(values[0]):
            rank = int((values > 1e-6 * values[0]).sum())
            raise UnsupportedModelError(
                f"the gradient of {layer} has rank {rank} of at most {len(values)} for {n} images: as many independent "
                "mixtures as images are needed, and fewer than neurons"
            )
        active = (gradient != 0).any(dim=0)
        # beyond the rank there is rounding of the released weights, or noise, of which weak directions have more
        beyond = float(values[n]) / (math.sqrt(len(gradient)) + math.sqrt(int(active.sum())))
        cone = _Cone(right[:n, active].numpy(), beyond / values[:n].numpy())
        if cone.coarse > _MOST:
            raise ThreatModelError(
                f"the gradient of {layer} is not spanned by {n} inputs: noise, pruning, or another number of images"
            )
        least, repeated = n - 1 + _EXCESS, 0
        if n > 1:
            cone = cone.without_copies()
            repeated = int(active.sum()) - cone.span.shape[1]
        found, zeros = self._vertices(cone, least)
        if not len(found):
            raise UnsupportedModelError(
                f"no input of {layer} was found: none of {self.starts} vertices has {least} zeros; fewer images, or "
                "attack without it"
            )
        bias = released.get(f"{layer}.bias")
        scaled = bias is not None and bool(bias.any())
        inputs = self._scaled(found @ right[:n], released, layer) if scaled else found @ right[:n]
        labels = self._labels(observation, released, layer, inputs, scaled)
        rounded = cone.coarse <= _ZERO
        error = "rounding" if rounded else f"an error of about {cone.error(found):.1g} of their largest number"
        note = (
            f"{len(inputs)} of {n} inputs of the layer {layer} are known up to {error}: {int(zeros.min())} to "
            f"{int(zeros.max())} of their {len(active)} numbers are zero"
        )
        note += f", {repeated} repetitions of others not counted" if repeated else ""
        note += f", {least} are needed" if n > 1 else ""
        note += "" if scaled else "; their scales are unknown, as no gradient of a bias tells them"
        return RecoveredInputs(layer, inputs, zeros + int((~active).sum()), labels, (note,), scaled)

    def _vertices(self, cone: _Cone, least: int) -> tuple[Tensor, Tensor]:
        """Coordinates `(r, n)` of independent vectors with at least so many zeros, and their numbers of zeros."""
        n, d = cone.span.shape
        generator, found, zeros = np.random.default_rng(self.seed), np.zeros((0, n)), list[int]()
        if n == 1:
            sign = np.sign(cone.span.sum()) * np.ones((1, 1))
            return torch.from_numpy(sign), torch.tensor([cone.zeros(sign[0], cone.coarse)])
        for _ in range(self.starts):
            chosen = generator.choice(d, min(_COORDINATES, d), replace=False)
            norm = cone.span[:, chosen] @ generator.random(len(chosen)) + 1e-3 * cone.span.sum(axis=1)
            # what is found already has nothing of what is sought next
            vertex = self._sparsest(cone, _outside(norm, found))
            fitted = None if vertex is None else cone.fitted(vertex)
            if fitted is None or fitted[1] < least or np.linalg.norm(_outside(fitted[0], found)) < _NEW:
                continue
            found, zeros = np.vstack([found, fitted[0]]), [*zeros, fitted[1]]
            if len(found) == n:
                break
        return torch.from_numpy(found), torch.tensor(zeros)

    def _sparsest(self, cone: _Cone, norm: Vector) -> Vector | None:
        """A vertex with a fixed weighted sum, with weights turned towards zeros; None if there is none."""
        weights, best, most = np.ones(cone.span.shape[1]), None, -1
        for _ in range(1 + self.reweightings):
            vertex = cone.vertex(weights, norm)
            if vertex is None:
                break
            count = cone.zeros(vertex, cone.coarse)
            if count <= most:
                break
            best, most = vertex, count
            entries = np.maximum(cone.entries(vertex), 0.0)
            weights = 1 / (entries / entries.max() + 1 / _SHARPEST)
        return best

    def _scaled(self, vectors: Tensor, released: Update, layer: str) -> Tensor:
        """The inputs with the scale that the gradient of the bias, the same mixture of ones, tells."""
        mixing = least_squares(exact(released[f"{layer}.weight"]).T, vectors.T).T
        inputs: Tensor = vectors / (mixing @ exact(released[f"{layer}.bias"]))[:, None]
        return inputs

    def _labels(
        self, observation: Observation, released: Update, layer: str, inputs: Tensor, scaled: bool
    ) -> Tensor | None:
        """Classes from the head's gradient, whose inputs follow from those of the layer; of any scale if it is that."""
        try:
            head = find_head(observation, "NonNegativeInputs")[0]
        except UnsupportedModelError:
            return None
        if not scaled and head != f"{layer}.weight":
            return None
        images = torch.zeros(len(inputs), *observation.image_shape)
        calls = linear_calls(observation, images, replaced={layer: inputs})[1]
        return labels_of(exact(calls[head.rpartition(".")[0]][0][0]), exact(released[head]))


class _Cone:
    """Vectors without negative entries in a span; every entry is divided by the length of its column.

    Args:
        span: rows `(n, d)`, coordinates of orthonormal ones.
        noise: standard deviation `(n,)` of the noise on the entries of each row.
    """

    def __init__(self, span: NDArray[np.float64], noise: Vector) -> None:
        self.lengths = np.linalg.norm(span, axis=0)
        self.span, self.noise = span / self.lengths, noise
        self.coarse = max(_ZERO, _COARSE * float(noise.max() / np.median(self.lengths)))

    def without_copies(self) -> _Cone:
        """The cone of different columns: where a layer's inputs repeat, one zero is many, and proves no more than one.

        Columns that are only proportional stay: so are those of all entries where the same image alone is not zero.
        """
        from scipy.spatial import cKDTree

        plain = self.span * self.lengths
        near = _SAME * self.noise[:, None] + _ALIKE * self.lengths.max()
        pairs = cKDTree((plain / near).T).query_pairs(1.0, p=np.inf, output_type="ndarray")
        return _Cone(np.delete(plain, pairs[:, 1], axis=1), self.noise) if len(pairs) else self

    def entries(self, vector: Vector) -> Vector:
        """All entries of the vector with these coordinates."""
        return np.asarray(self.span.T @ vector)

    def error(self, vectors: Tensor) -> float:
        """Standard deviation of the noise on the entries of vectors `(r, n)`, relative to the largest; of the worst."""
        noisy = (vectors * torch.from_numpy(self.noise)).norm(dim=1)
        return float((noisy / (vectors @ torch.from_numpy(self.span * self.lengths)).amax(1)).max())

    def zeros(self, vector: Vector, share: float) -> int:
        """Number of entries that are at most this share of the largest."""
        entries = self.entries(vector)
        return int((entries <= share * entries.max()).sum())

    def vertex(self, costs: Vector, norm: Vector) -> Vector | None:
        """The cheapest vector of the cone with a fixed product with `norm`; None without one."""
        from scipy.optimize import linprog

        zeros, whole = np.zeros(self.span.shape[1]), (None, None)
        solved = linprog(self.span @ costs, -self.span.T, zeros, norm[None], [1.0], bounds=whole, method="highs-ds")
        return np.asarray(solved.x) / np.linalg.norm(solved.x) if solved.status == 0 else None

    def fitted(self, vertex: Vector) -> tuple[Vector, int] | None:
        """The vector that is smallest where the vertex is zero, and its number of zeros within the noise.

        None where another vector vanishes there too: all inputs between two vanish on the zeros that both have.
        """
        plain, best, entries = self.span * self.lengths, vertex, self.entries(vertex)
        chosen, values = entries <= self.coarse * entries.max(), np.ones(2)
        for units in _UNITS:
            if chosen.sum() < len(best):
                return None
            # noise is alike on all entries before they are divided
            left, values, _ = np.linalg.svd(plain[:, chosen], full_matrices=False)
            best = left[:, -1] * np.sign(left[:, -1] @ vertex)
            size = np.abs(plain.T @ best)
            chosen = size <= units * np.linalg.norm(best * self.noise) + _ZERO * size.max()
        return (best, int(chosen.sum())) if values[-2] > _ALONE * values[0] else None


def _outside(vector: Vector, others: NDArray[np.float64]) -> Vector:
    """The part of a vector outside the span of the others, which are rows."""
    if not len(others):
        return vector
    return np.asarray(vector - others.T @ np.linalg.lstsq(others.T, vector, rcond=None)[0])


def rectified_layer(observation: Observation) -> str:
    """The first linear layer whose inputs are outputs of a ReLU.

    An UnsupportedModelError without one, a ThreatModelError where its gradient is zero.
    """
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(16, observation.image_shape[0], 4, 4, generator=generator)
    images = nn.functional.interpolate(coarse, size=observation.image_shape[1:], mode="bilinear")
    for name, calls in linear_calls(observation, images)[1].items():
        given = calls[0][0]
        zeros = float((given == 0).double().mean())
        if len(calls) == 1 and given.dim() == 2 and bool((given >= 0).all()) and zeros >= _RECTIFIED:
            if not observation.update[f"{name}.weight"].any():
                raise ThreatModelError(f"the gradient of the linear layer {name} is zero everywhere")
            return name
    raise UnsupportedModelError(
        f"{type(observation.model).__name__} has no linear layer whose inputs are outputs of a ReLU: attack without "
        "them"
    )


class InputMatching:
    """Recovers the inputs of an inner linear layer, and penalizes candidates with other ones.

    Args:
        recovery: finds the inputs.
        weight: of the penalty, the squared error of the inputs over their mean square.
    """

    def __init__(self, recovery: NonNegativeInputs | None = None, weight: float = 1.0) -> None:
        if weight < 0:
            raise ConfigError(f"InputMatching needs a weight of at least 0; got {weight:g}")
        self.recovery, self.weight = recovery or NonNegativeInputs(), weight

    def prepare(self, observation: Observation) -> InputPenalty:
        """Recover a victim's inputs; errors as for `NonNegativeInputs`."""
        recovered = self.recovery(observation)
        return InputPenalty(recovered, LayerInputs(observation, recovered.layer), self.weight, recovered.notes)


class LayerInputs(nn.Module):
    """Inputs of a linear layer for candidate images at the public weights, `(n, d)`, differentiable.

    BatchNorm takes statistics of each client's and each mini-batch's equal share of the images, in order.
    """

    def __init__(self, observation: Observation, layer: str) -> None:
        super().__init__()
        mode: BatchNormMode = observation.operator.batch_norm
        self.model = pure_copy(observation.model, mode)
        self.public: Mapping[str, Tensor] = {**observation.parameters, **observation.buffers}
        self.parts = normalized_apart(observation, mode)
        self.seen: list[Tensor] = []
        self.model.get_submodule(layer).register_forward_pre_hook(self._note)

    def _note(self, _: nn.Module, given: tuple[Tensor, ...]) -> None:
        self.seen.append(given[0])

    def forward(self, images: Tensor) -> Tensor:
        """Inputs of the layer for images `(n, c, h, w)` in [0, 1]."""
        for share in images.split(max(1, len(images) // self.parts)):
            torch.func.functional_call(self.model, dict(self.public), (share,))
        seen, self.seen = self.seen, []
        return torch.cat(seen)


@dataclass(frozen=True)
class InputPenalty(Penalty):
    """The penalty of `InputMatching` for one victim."""

    recovered: RecoveredInputs
    inputs_of: LayerInputs
    weight: float
    notes: tuple[str, ...] = ()

    def targets(self, images: Tensor, labels: Tensor | None) -> Tensor:
        """The recovered inputs in the order of the candidates, by label where that is known; NaN where none is left."""
        from scipy.optimize import linear_sum_assignment

        own, found = self.recovered.labels, self.recovered.inputs.to(images)
        targets = images.new_full((len(images), found.shape[1]), torch.nan)
        rows, order = torch.arange(len(found)), torch.arange(len(found))
        if own is not None and labels is not None:
            cost = (labels.cpu()[:, None] != own.cpu()[None, :]).double()
            rows, order = (torch.as_tensor(part) for part in linear_sum_assignment(cost.numpy()))
        targets[rows.to(images.device)] = found[order.to(images.device)]
        return targets

    def penalty(self, images: Tensor, targets: Tensor, progress: float) -> Tensor:
        known = ~targets[:, 0].isnan()
        inputs, wanted = self.inputs_of(images)[known], targets[known]
        if not self.recovered.scaled:
            inputs, wanted = nn.functional.normalize(inputs, dim=1), nn.functional.normalize(wanted, dim=1)
        errors: Tensor = (inputs - wanted).square().sum(dim=1) / wanted.square().sum(dim=1)
        return self.weight * errors.mean()
