"""The last few unknown training images, by repeating the training until its weights agree with the released ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lit_recon.attacks.anderson import Anderson
from lit_recon.attacks.base import SimpleState
from lit_recon.attacks.trainset.base import Candidates, ReleasedModel, TrainsetAttack
from lit_recon.attacks.trainset.subspace import first_layer
from lit_recon.attacks.trainset.training import Training, Weights
from lit_recon.errors import ConfigError, ThreatModelError, UnsupportedModelError
from lit_recon.records import Reconstruction

#: The Anderson iteration restarts from its best guess when its distance exceeds the least one by this factor.
_LOST = 2.0
#: Factor on the damping of corrections after such a restart.
_CAREFUL = 0.5
#: Coefficients below this share of the largest singular value are taken as zero.
_RANK = 1e-3
#: Largest root mean square of the correction that the first layer asks of a certified image.
_CERTAIN = 0.01


@dataclass
class RepeatedTraining(TrainsetAttack):
    """All training images but `u` are known, and so are start, training and labels: `u` guesses are corrected.

    `descent` minimizes the squared distance of the weights by L-BFGS, with the gradient through all steps of the
    training: 3 to 5 trainings a step, which are kept in memory. `anderson` costs one training a step and no such
    memory: the first layer's weights are the start plus a sum, over images, of coefficients times the image; guesses
    are corrected by least squares as if coefficients did not depend on them, with Anderson acceleration. That needs a
    start near the truth and at most as many unknown images as neurons in the first layer.

    Images of one label must start from different guesses, or they stay alike. Results of one label may be exchanged.

    With `training.parts`, the unknown images must be the last ones. The start of the search is clamped to [0, 1].

    Args:
        steps: of the search.
        method: `descent` or `anderson`.
        memory: number of earlier steps that either method combines.
        tolerance: distance of the weights at which the search ends. Distances are relative to that of the released
            weights from those of a training on the known images, or from the start where one of `parts` has none.
        certain: distance at most which images can be certified: those that the first layer, which has to be linear on
            all pixels, would correct by a root mean square of at most 0.01. An image of little effect is not.

    Source: ours; [Anderson1965] for the acceleration, [Balle2022] for the adversary, there with `u` = 1.
    """

    steps: int = 200
    method: Literal["descent", "anderson"] = "descent"
    memory: int = 50
    tolerance: float = 1e-5
    certain: float = 1e-3

    def __post_init__(self) -> None:
        if min(self.steps, self.memory) < 1 or not 0 < self.tolerance <= self.certain < 1:
            raise ConfigError(f"steps and memory must be at least 1 and 0 < tolerance <= certain < 1; got {self}")
        if self.method not in ("descent", "anderson"):
            raise ConfigError(f"method must be descent or anderson; got {self.method!r}")

    def check(self, start: Candidates) -> None:
        seen = start.seen
        training, _ = _known(seen)
        if training.dp is not None:
            raise ThreatModelError(
                "a training with dp cannot be repeated: its clipping and noise are not simulated; attack a training "
                "without dp"
            )
        if start.n_examples != seen.n_unknown:
            raise ThreatModelError(
                f"RepeatedTraining needs to know all training images but those that it reconstructs: {seen.n_known} "
                f"known and {start.n_examples} candidates of {seen.n_examples}; give {seen.n_unknown} candidates"
            )
        if self.method == "anderson":
            first_layer(seen)

    def init(self, start: Candidates) -> SimpleState:
        images = start.images.detach().to(start.like).clamp(0, 1)
        least, scale = torch.full((), math.inf, dtype=torch.float64), torch.tensor(_scale(start), dtype=torch.float64)
        common: dict[str, Any] = {"images": images, "best": images.clone(), "least": least, "scale": scale}
        if self.method == "anderson":
            memory = Anderson(1, images.numel(), self.memory, images.device)
            damping = torch.ones(1, dtype=torch.float64, device=images.device)
            return SimpleState([start], **common, memory=memory, damping=damping, correction=torch.zeros_like(images))
        optimizer = torch.optim.LBFGS(
            [images.requires_grad_()],
            max_iter=1,
            history_size=self.memory,
            tolerance_grad=0.0,
            tolerance_change=0.0,
            line_search_fn="strong_wolfe",
        )
        return SimpleState([start], **common, optimizer=optimizer)

    def step(self, state: SimpleState) -> None:
        if float(state["least"]) > self.tolerance:
            distance = self._descend(state) if self.method == "descent" else self._correct(state)
        else:
            distance = float(state["least"])
        state.note([distance], least=[float(state["least"])])

    def result(self, state: SimpleState) -> Reconstruction:
        [start] = state.observations
        distance, images = float(state["least"]), state["best"].detach().clone()
        certified = torch.zeros(start.n_examples, dtype=torch.bool)
        note = (
            f"{start.n_examples} unknown images: the weights of a training on the result differ from the released ones "
            f"by {distance:.2g} of the effect of the true images; certified are at most {self.certain:g}, and images "
            f"that the first layer would correct by at most {_CERTAIN:g}"
        )
        if distance <= self.certain:
            try:
                certified = _is_certain(start, images)
            except UnsupportedModelError as error:
                note += f"; none is certified: {error}"
        return Reconstruction(
            images,
            start.labels.clone(),
            distance,
            notes=(note,),
            certified=certified,
        )

    def _descend(self, state: SimpleState) -> float:
        """One step of L-BFGS; the distance before it."""
        [start] = state.observations
        seen, images = start.seen, state["images"]
        training, begin = _known(seen)

        def closure() -> Tensor:
            every, labels = seen.with_known(images, start.labels)
            found = training.unrolled(seen.model, every, labels, begin)
            squared: Tensor = _squared_distance(found, seen.weights) / state["scale"].square()
            self._keep(state, math.sqrt(squared.detach()))
            images.grad = torch.autograd.grad(squared, images)[0]
            return squared

        last, optimizer = images.detach().clone(), state["optimizer"]
        before: Tensor = optimizer.step(closure)
        if torch.equal(last, images.detach()):  # no progress along this direction: begin again with the gradient
            optimizer.state.clear()
        return math.sqrt(before.detach())

    def _correct(self, state: SimpleState) -> float:
        """One correction by the first layer; the distance before it."""
        [start] = state.observations
        guesses = state["images"].clone()  # the memory keeps them
        found, missing, _ = _first_layer_says(start, guesses, _RANK)
        distance = math.sqrt(_squared_distance(found, start.seen.weights)) / float(state["scale"])
        correction = missing.view_as(guesses)
        memory, damping = state["memory"], state["damping"]
        if distance > _LOST * float(state["least"]):
            memory.forget(torch.ones_like(damping, dtype=torch.bool))
            damping *= _CAREFUL
            guesses, correction = state["best"].clone(), state["correction"].clone()
        elif self._keep(state, distance):
            state["correction"].copy_(correction)
        following = memory.next(guesses.double().view(1, -1), correction.double().view(1, -1), damping)
        state["images"].copy_(following.clamp(0, 1).view_as(guesses))
        return distance

    def _keep(self, state: SimpleState, distance: float) -> bool:
        """Keep the present images if they are the best so far; whether they are."""
        if closer := distance < float(state["least"]):
            state["best"].copy_(state["images"].detach())
            state["least"].fill_(distance)
        return closer


def _known(seen: ReleasedModel) -> tuple[Training, Weights]:
    """The training and its start; ThreatModelError if they are not known."""
    if seen.training is None or seen.start is None:
        missing = "training" if seen.training is None else "initial weights"
        raise ThreatModelError(
            f"RepeatedTraining needs the {missing} of the released model: give them, or attack by KKT"
        )
    return seen.training, seen.start


def _is_certain(start: Candidates, images: Tensor) -> Tensor:
    """For every image `(u,)`: the first layer tells it from the others, and would hardly correct it."""
    _, missing, coefficients = _first_layer_says(start, images, 0.0)
    if int(torch.linalg.matrix_rank(coefficients)) < len(images):
        return torch.zeros(len(images), dtype=torch.bool)
    return (missing.square().mean(dim=1).sqrt() <= _CERTAIN).cpu()


def _first_layer_says(start: Candidates, guesses: Tensor, rank: float) -> tuple[Weights, Tensor, Tensor]:
    """A training on guesses: its weights, what is missing in each guess `(u, d)`, and their coefficients `(u, j)`.

    Nothing is missing along coefficients below the share `rank` of the largest singular value; UnsupportedModelError
    without a linear layer on all pixels.
    """
    seen = start.seen
    training, begin = _known(seen)
    name, _, scale = first_layer(seen)
    layer = seen.model.get_submodule(name)
    assert isinstance(layer, nn.Linear)
    images, labels = seen.with_known(guesses, start.labels)
    marked = MarkedImages(seen.model, layer, start)
    coefficients = torch.zeros(start.n_examples + 1, layer.out_features).to(start.like)
    weights = {f"model.{name}": weight for name, weight in begin.items()} | {"coefficients": coefficients}
    trained = training.run(marked, marked.mark(images), labels, weights).weights
    found = {name: trained[f"model.{name}"] for name in begin}
    own = trained["coefficients"][:-1]
    missing = torch.linalg.pinv(own.T, rtol=rank) @ (seen.weights[f"{name}.weight"] - found[f"{name}.weight"])
    return found, missing / scale, own


def _squared_distance(weights: Mapping[str, Tensor], released: Mapping[str, Tensor]) -> Tensor:
    return torch.stack([(weights[name] - released[name]).square().sum() for name in released]).sum()


def _scale(start: Candidates) -> float:
    """Distance of the released weights from those of a training on the known images, in the parts in which they were.

    From the start where a part has no known image. ThreatModelError if it is 0: the unknown images had no effect.
    """
    seen = start.seen
    training, begin = _known(seen)
    others = begin
    known_in_all = all(bool((part < seen.n_known).any()) for part in training.split(seen.n_examples))
    if seen.known_images is not None and seen.known_labels is not None and known_in_all:
        known = seen.known_images.to(seen.like), seen.known_labels
        others = training.run(seen.model, *known, begin, left_out=seen.n_unknown).weights
    scale = math.sqrt(_squared_distance(others, seen.weights))
    if not scale:
        raise ThreatModelError(
            "RepeatedTraining needs released weights that the unknown images have moved; got exactly those without "
            "these images: they left no trace in this model, attack another one"
        )
    return scale


class MarkedImages(nn.Module):
    """A network whose images carry their position among the unknown ones, to learn their coefficients in training.

    The parameter `coefficients`, `(u + 1, j)`, does not change the outputs. Its gradient is that of the outputs of the
    first layer's `j` neurons, so that a training which starts it at zero ends with the factors by which the `u` images
    were added to the layer's weights. Row `u` belongs to all known images.
    """

    def __init__(self, model: nn.Module, layer: nn.Linear, start: Candidates) -> None:
        super().__init__()
        self.model, self.shape, self.n_unknown = model, start.image_shape, start.n_examples
        self.coefficients = nn.Parameter(torch.zeros(start.n_examples + 1, layer.out_features))
        self._layer = [layer]  # in a list: it is no submodule of this module itself

    def mark(self, images: Tensor) -> Tensor:
        """Rows `(n, d + 1)`: pixels and position of images `(n, c, h, w)`, of which the unknown ones come last."""
        positions = torch.arange(len(images)) - (len(images) - self.n_unknown)
        positions = torch.where(positions < 0, self.n_unknown, positions)
        return torch.cat([images.flatten(1), positions[:, None].to(images)], dim=1)

    def forward(self, marked: Tensor) -> Tensor:
        """Outputs `(n, k)` of rows of `mark`."""
        own = self.coefficients[marked[:, -1].long()]
        hook = self._layer[0].register_forward_hook(lambda layer, inputs, outputs: outputs + (own - own.detach()))
        try:
            outputs: Tensor = self.model(marked[:, :-1].unflatten(1, self.shape))
        finally:
            hook.remove()
        return outputs
