"""The whole training set, exactly, from the change of a first layer with ReLU, by the neurons that stay inactive.

Gradient descent changes every row of a first linear layer by a combination of the training images, in which an image
that never activates the neuron has no part. In the span of the change, the rows of all these neurons lie in one
hyperplane, and the normals of the hyperplanes of all images are the dual basis of the images: they give all images at
once, up to factors, which the change of the biases tells. Nothing else matters: neither the loss, the layers behind,
the number of steps and images per step, nor the momentum.

A hyperplane is found from a guess of its image: the guess says which neurons are inactive at the start and at the end,
which is right for most of them, and a robust fit discards the others. Further guesses are made orthogonal to the
normals that are known, so that they are combinations of the images which are still to be found.

Source: [Dimitrov2024] recovers a batch from one gradient by the zeros of ReLU, which it samples. The robust fit is
dual principal component pursuit, [Tsakiris2018].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lit_recon.attacks.base import SimpleState
from lit_recon.attacks.trainset.base import Candidates, ReleasedModel, TrainsetAttack
from lit_recon.attacks.trainset.subspace import first_layer, shrinkage
from lit_recon.attacks.trainset.training import named_labels
from lit_recon.errors import ConfigError, ThreatModelError, UnsupportedModelError
from lit_recon.records import Reconstruction

#: Rows that must lie in a hyperplane beyond as many as there are dimensions: through one less there always is one.
_REDUNDANT = 5
#: Least singular value, relative to the largest, of the rows in a hyperplane: below, they determine several.
_DEGENERATE = 1e-3
#: Largest leverage of a row in a hyperplane; a direction that only one row determines has 1.
_LEVERAGE = 0.98
#: A row lies in a hyperplane if its distance is at most this many times the rounding error of the weights.
_ERRORS = 20.0
#: The same for the error of the fit, relative to the row's length.
_FIT = 1e-9
#: Iterations of the robust fit, and the factor by which its scale falls in each.
_ITERATIONS, _FALL = 40, 0.5
#: Power of the distances whose sum the robust fit minimizes.
_POWER = 0.5
#: Rounds of fits to a guess, and the share of all rows that those after the first are fitted to.
_ROUNDS, _TRIMMED = 3, 0.35
#: A certified image leaves the pixels' range by at most this.
_OUTSIDE = 1e-2
#: Rows that a hyperplane must have beside those of any other one: two rounded ones agree in a false one by chance.
_BESIDE = 3
#: Least share of the rows in an image's hyperplane whose neurons it leaves inactive at the start or at the end.
_CONSISTENT = 0.9
#: Share of a guess's rows that a hyperplane is fitted to.
_DRAWN = 0.9
#: Normals whose cosine is above one minus this are the same.
_SAME = 1e-7
#: Standard deviation of random guesses around the mean image.
_GUESS_STD = 0.3


@dataclass(frozen=True, eq=False)
class LayerChange:
    """The change of a first layer with biases; the weights act on `(pixels - center) * scale` and a one.

    Attributes:
        center, scale: `(d,)`.
        start, end: weights and biases `(w, d + 1)` of all neurons.
        rows: changes of neurons that changed at all, in coordinates of the span, `(v, r)`.
        neurons: numbers of these neurons `(v,)`.
        basis: orthonormal rows `(r, d + 1)` of the span of the images and their ones.
        error: of a coordinate of a row, by rounding.
        isotropic: `(r, r)`; `rows @ isotropic`, divided by their lengths, vary equally in all directions.
    """

    center: Tensor
    scale: Tensor
    start: Tensor
    end: Tensor
    rows: Tensor
    neurons: Tensor
    basis: Tensor
    error: float
    isotropic: Tensor

    @classmethod
    def of(cls, seen: ReleasedModel) -> LayerChange:
        """Of a released model with a known start; UnsupportedModelError where the layer is not as needed."""
        if seen.start is None:
            raise ThreatModelError(
                "the change of the first layer needs the weights at which the training began: give the start, or "
                "attack the released weights alone by MarginKKT"
            )
        name, center, scale = first_layer(seen)
        if f"{name}.bias" not in seen.weights or not any(isinstance(m, nn.ReLU) for m in seen.model.modules()):
            raise UnsupportedModelError(
                f"inactive neurons are those of a first layer with biases and ReLU; this {type(seen.model).__name__} "
                "has no ReLU, or no biases there: attack it by KnownStart"
            )
        start, end = (
            torch.cat([weights[f"{name}.weight"], weights[f"{name}.bias"][:, None]], dim=1).double()
            for weights in (seen.start, seen.weights)
        )
        shrunk = 1.0 if seen.weight_decay == 0 else shrinkage(start, end, seen.n_examples)
        change = end - shrunk * start
        _, values, basis = torch.linalg.svd(change, full_matrices=False)
        rank = _rank(values, seen.n_examples, max(change.shape) * torch.finfo(seen.like.dtype).eps)
        basis = basis[:rank]
        rows = change @ basis.T
        rest = (change - rows @ basis).square().mean().sqrt()
        error = float(rest) + torch.finfo(torch.float64).eps * float(end.abs().max())
        neurons = torch.nonzero(rows.norm(dim=1) > _ERRORS * error * rank).flatten()
        if len(neurons) <= 2 * rank:
            raise UnsupportedModelError(
                f"{rank} images need more than {2 * rank} neurons whose change is a combination of images; there are "
                f"{len(neurons)}: the layer is too narrow for this attack, was hardly trained, began at other weights "
                "than the start, or was trained with noise or by Adam, whose steps are no such combinations"
            )
        flat, own = center.flatten().double(), scale.flatten().double()
        return cls(flat, own, start, end, rows[neurons], neurons, basis, error, _isotropic(rows[neurons]))

    @property
    def rank(self) -> int:
        return len(self.basis)

    def inputs(self, images: Tensor) -> Tensor:
        """What the layer takes, with a one behind, `(n, d + 1)`, of images `(n, c, h, w)`."""
        pixels = (images.to(self.center).flatten(1) - self.center) * self.scale
        return torch.cat([pixels, pixels.new_ones(len(images), 1)], dim=1)

    def images(self, inputs: Tensor) -> Tensor:
        """Images `(n, d)` of inputs up to a factor, `(n, d + 1)`."""
        return inputs[:, :-1] / inputs[:, -1:] / self.scale + self.center

    def inactive(self, inputs: Tensor) -> Tensor:
        """Neurons `(n, v)` that inputs `(n, d + 1)` leave inactive at the start and at the end."""
        first, last = (inputs @ weights[self.neurons].T for weights in (self.start, self.end))
        return (first <= 0) & (last <= 0)

    def within(self, normal: Tensor) -> Tensor:
        """Which rows `(..., v)` lie in the hyperplanes with these normals `(..., r)`, up to rounding."""
        within: Tensor = (normal @ self.rows.T).abs() <= self.allowed * normal.norm(dim=-1, keepdim=True)
        return within

    @property
    def allowed(self) -> Tensor:
        """Largest distance `(v,)` of each row from a hyperplane in which it lies."""
        allowed: Tensor = _ERRORS * self.error + _FIT * self.rows.norm(dim=1)
        return allowed

    def fit(self, chosen: Tensor) -> Tensor | None:
        """The normal `(r,)` of a hyperplane of many rows, such as most of the chosen ones `(v,)`; None: none found.

        Each round after the first fits the rows next to the hyperplane found so far.
        """
        units = nn.functional.normalize(self.rows @ self.isotropic, dim=1)
        rows = units[chosen]
        for _ in range(_ROUNDS):
            if len(rows) < self.rank:
                break
            normal = _robust_normal(rows)
            exact = self._exact(self.isotropic @ normal)
            if exact is not None:
                return exact
            distances = (units @ normal).abs()
            rows = units[distances <= distances.quantile(_TRIMMED)]
        return None

    def _exact(self, normal: Tensor) -> Tensor | None:
        """The unit normal fitted to all rows of a hyperplane, or None where these do not determine it."""
        within = self.within(normal)
        if int(within.sum()) < self.rank + _REDUNDANT:
            return None
        rows = nn.functional.normalize(self.rows[within] @ self.isotropic, dim=1)
        left, values, _ = torch.linalg.svd(rows, full_matrices=False)
        # Rows without parts of two images span two dimensions less; any single row more gives another hyperplane.
        leverage = left[:, :-1].square().sum(dim=1)
        if values[-2] < _DEGENERATE * values[0] or float(leverage.max()) > _LEVERAGE:
            return None
        exact: Tensor = nn.functional.normalize(self.isotropic @ self._weighted(within)[1][-1], dim=0)
        return exact

    def _weighted(self, within: Tensor) -> tuple[Tensor, Tensor]:
        """Singular values and directions of the rows in a hyperplane, over what is allowed of each."""
        rows = (self.rows / self.allowed[:, None])[within] @ self.isotropic
        _, values, directions = torch.linalg.svd(rows, full_matrices=False)
        return values, directions

    def precision(self, normals: Tensor) -> Tensor:
        """What rounding changes at most `(r,)` in any pixel of the images of these normals `(r, r)`.

        An error of one normal mixes its image into the others; errors of the span change all pixels.
        """
        inverse = torch.linalg.inv(normals.T)
        mixed = []
        for within in self.within(normals):
            values, directions = self._weighted(within)
            mixed.append((inverse @ self.isotropic @ (directions[:-1].T / values[:-1])).norm(dim=1))
        ones = (inverse @ self.basis[:, -1]).abs()
        shares = (torch.stack(mixed, dim=1) * ones / ones[:, None]).fill_diagonal_(0)
        outside = _ERRORS * self.error * (inverse / self.rows.norm(dim=0)).norm(dim=1) / ones / self.scale.min()
        precision: Tensor = shares.norm(dim=1) + outside
        return precision


def _robust_normal(rows: Tensor) -> Tensor:
    """The unit vector `(r,)` with the smallest sum of roots of distances to rows `(v, r)`, from that of squares.

    Iteratively reweighted least squares: the root, unlike the absolute value, hardly minds rows far away, and most of
    these are on one side.
    """
    normal = _last_direction(rows)
    scale = float((rows @ normal).abs().median())
    for _ in range(_ITERATIONS):
        weights = (rows @ normal).abs().clamp_min(max(scale, 1e-13)).pow(_POWER - 2)
        normal = _last_direction(rows * weights.sqrt()[:, None])
        scale *= _FALL
    return normal


def _last_direction(rows: Tensor) -> Tensor:
    """The unit vector `(r,)` along which rows `(v, r)` are smallest."""
    direction: Tensor = torch.linalg.eigh(rows.T @ rows).eigenvectors[:, 0]
    return direction


def _rank(values: Tensor, most: int, precision: float) -> int:
    """The number of singular values above rounding, at most `most`: before the largest drop, if that is clear."""
    above = values[: most + 1].clamp_min(precision * float(values[0]) * 1e-3)
    if len(above) <= most:
        above = torch.cat([above, above.new_tensor([precision * float(values[0]) * 1e-3])])
    return int((above[:-1] / above[1:]).argmax()) + 1


def _isotropic(rows: Tensor) -> Tensor:
    """A map `(r, r)` after which rows `(v, r)` of unit length vary equally in all directions: Tyler's estimate."""
    found = torch.eye(rows.shape[1], dtype=rows.dtype, device=rows.device)
    for _ in range(200):
        units = nn.functional.normalize(rows @ found, dim=1)
        values, vectors = torch.linalg.eigh(units.T @ units * (rows.shape[1] / len(rows)))
        if float((values - 1).abs().max()) < 1e-6:
            break
        found = found @ vectors / values.clamp_min(1e-12).sqrt()
    isotropic: Tensor = found / found.norm()
    return isotropic


@dataclass
class InactiveNeurons(TrainsetAttack):
    """All training images, exactly, from initial and final weights; see this module.

    For gradient descent with or without momentum, mini-batches and weight decay, on a network whose first layer is
    linear, has biases and ReLU and more neurons than twice the training images; not for Adam or noisy training. The
    candidates are the first guesses, in turn; then random images follow. Steps after the last hyperplane do nothing.

    Args:
        steps: guesses at most.
    """

    steps: int = 2000

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"steps must be at least 1; got {self.steps}")

    def check(self, start: Candidates) -> None:
        LayerChange.of(start.seen)

    def init(self, start: Candidates) -> SimpleState:
        return SimpleState([start], search=_Search(start, LayerChange.of(start.seen)))

    def step(self, state: SimpleState) -> None:
        search: _Search = state["search"]
        if len(search.normals) < search.change.rank:
            normal = search.change.fit(search.chosen(state.step))
            if normal is not None:
                search.add(normal)
        state.note([1 - len(search.normals) / search.change.rank])

    def result(self, state: SimpleState) -> Reconstruction:
        search: _Search = state["search"]
        start, rank, n_found = search.start, search.change.rank, len(search.normals)
        images, labels = start.images.clone(), start.labels.clone()
        certified = torch.zeros(len(images), dtype=torch.bool)
        note = f"the first layer's change has rank {rank}, of {start.seen.n_examples} training images"
        if n_found < rank:
            missing = (
                f"{n_found} of {rank} hyperplanes were found that fit together: no image is determined without all"
            )
            return Reconstruction(images, labels, 1 - n_found / rank, notes=(note, missing), certified=certified)
        found, sure = search.solution()
        notes = [note]
        precision = search.change.precision(search.normals)
        if bool((precision > _OUTSIDE).any()):
            notes.append(
                f"rounding of the weights may change pixels by up to {float(precision.max()):.2g} of their range; "
                f"images are certified up to {_OUTSIDE:g}"
            )
        sure = sure & (precision <= _OUTSIDE)
        if start.seen.known_images is not None and start.seen.n_known:
            known = start.seen.known_images.to(found).flatten(1)
            new = torch.cdist(found, known, p=torch.inf).amin(dim=1) > _OUTSIDE
            found, sure = found[new], sure[new]
        n = min(len(images), len(found))
        if len(found) > n:
            notes.append(f"{len(found)} images were found, of which {n} are returned: give as many candidates")
        loss = 1 - float(sure.double().mean()) if len(sure) else 1.0
        order = (~sure).long().argsort(stable=True)[:n]
        images[:n] = found[order].view(n, *start.image_shape).to(images)
        certified[:n] = sure[order]
        outputs = start.seen.outputs(start.seen.weights, images[:n])
        labels[:n] = named_labels(start.seen.task, outputs)
        return Reconstruction(images, labels, loss, notes=tuple(notes), certified=certified)


class _Search:
    """The normals `(f, r)` found so far; what is drawn and found is saved, the change is computed again."""

    def __init__(self, start: Candidates, change: LayerChange) -> None:
        self.start, self.change = start, change
        self.normals = torch.zeros(0, change.rank, dtype=torch.float64, device=change.rows.device)
        self._generator = torch.Generator().manual_seed(start.seed)

    def state_dict(self) -> dict[str, Tensor]:
        return {"normals": self.normals, "generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.normals = state["normals"].to(self.normals.device)  # a state is read to the CPU
        self._generator.set_state(state["generator"])

    def guess(self, step: int) -> Tensor:
        """Inputs `(1, d + 1)` of a combination of the images that are still to be found."""
        if step < len(self.start.images):
            image = self.start.images[step][None]
        else:
            mean = self.start.seen.mean.double()
            # drawn on the CPU, so that all devices see the same numbers
            drawn = torch.randn(1, *self.start.image_shape, generator=self._generator, dtype=torch.float64)
            image = mean + _GUESS_STD * drawn.to(mean)
        coordinates = self.change.inputs(image) @ self.change.basis.T
        if len(self.normals):
            known = torch.linalg.qr(self.normals.T).Q
            coordinates = coordinates - coordinates @ known @ known.T
        inputs = coordinates @ self.change.basis
        return inputs * inputs[:, -1:].sign()

    def chosen(self, step: int) -> Tensor:
        """Rows `(v,)` to which the next hyperplane is fitted: a random part of those that a guess leaves inactive.

        The guesses for the last image are all alike, and only other rows give other fits.
        """
        inactive = self.change.inactive(self.guess(step))[0]
        drawn = torch.rand(len(inactive), generator=self._generator) < _DRAWN
        return inactive & drawn.to(inactive.device)

    def add(self, normal: Tensor) -> None:
        """Keep a new normal; when all are there but give no training set, forget the least consistent one."""
        if bool(((self.normals @ normal).abs() > 1 - _SAME).any()):
            return
        self.normals = torch.cat([self.normals, normal[None]])
        if len(self.normals) == self.change.rank and not self.solution()[1].all():
            share, beside = self.consistency(self.solution()[0])
            own = beside.amin(dim=1)
            worst = torch.where((own < _BESIDE) | (share >= _CONSISTENT), own, _BESIDE - 1 + share).argmin()
            self.normals = self.normals[torch.arange(self.change.rank) != int(worst)]

    def solution(self) -> tuple[Tensor, Tensor]:
        """Images `(r, d)` of all normals, and which are in range, leave neurons inactive and are determined `(r,)`."""
        inputs = torch.linalg.inv(self.normals.T) @ self.change.basis
        images = self.change.images(inputs)
        inside = ((images > -_OUTSIDE) & (images < 1 + _OUTSIDE)).all(dim=1)
        share, beside = self.consistency(images)
        # a hyperplane with few rows of its own may be turned towards the other one, which changes the other's image
        determined = (beside >= _BESIDE).all(dim=0)
        enough = (self.change.within(self.normals).sum(dim=1) >= self.change.rank + _REDUNDANT).all()
        return images, inside & (share >= _CONSISTENT) & determined & enough

    def consistency(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Share of the rows in its hyperplane `(r,)` whose neurons each image `(r, d)` leaves inactive.

        And how many rows lie in one hyperplane and not in another, `(r, r)`, infinite for one and itself.
        """
        shown = self.change.inputs(images.view(-1, *self.start.image_shape))
        # not both: where a training is on parts of the images in turn, neurons change after an image had its turn
        idle = torch.stack([shown @ at[self.change.neurons].T <= 0 for at in (self.change.start, self.change.end)])
        within = self.change.within(self.normals)
        share = (idle.any(dim=0) & within).sum(dim=1) / within.sum(dim=1)
        return share, (within.double() @ (~within).double().T).fill_diagonal_(torch.inf)
