"""Images whose gradients at the first and at the last weights explain the change of the weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap
from torch.nn import functional as F

from lit_recon.attacks.base import SimpleState
from lit_recon.attacks.trainset.base import Candidates, ReleasedModel, TrainsetAttack
from lit_recon.attacks.trainset.inner import need_change
from lit_recon.attacks.trainset.kkt import replace_relu, unsmoothed
from lit_recon.attacks.trainset.training import Weights, named_labels, signs
from lit_recon.defenses.vectors import flatten
from lit_recon.errors import ConfigError, ThreatModelError
from lit_recon.records import Reconstruction
from lit_recon.solving import least_squares

#: Numbers in the matrix of all gradients up to which the first multipliers are a least squares fit.
_MOST_NUMBERS = 50_000_000


@dataclass
class KnownStart(TrainsetAttack):
    """The change of the weights as a combination of gradients of the candidates' outputs at first and last weights.

    In a training in which the network stays nearly linear in its weights, the change is a sum over the training images
    of their outputs' gradients. Images and both sets of multipliers ("duals") of the sum are found by Adam. Known
    training images have multipliers, too. The labels returned are the classes whose outputs the multipliers raise.
    Weight decay also shrinks the start: unless it is known to be 0, what is parallel to the start is left out.

    Args:
        steps: of Adam.
        lr: of the images, in units of the range of pixels.
        lr_duals: of the multipliers, in units of the root mean square of the first ones, which fit the first images.
        beta: sharpness of the softplus in the place of ReLU, in the first and in the last step; in between it grows
            exponentially.
        box: weight of the squared excess of pixels outside [0, 1].

    Source: [Loo2023], without weight decay; the first duals are ours: a fit to the first images.
    """

    steps: int = 5000
    lr: float = 0.02
    lr_duals: float = 0.02
    beta: tuple[float, float] = (10.0, 200.0)
    box: float = 1e-4

    def __post_init__(self) -> None:
        if self.steps < 1 or min(self.lr, self.lr_duals, *self.beta) <= 0 or not self.box >= 0:
            raise ConfigError(
                "steps must be at least 1, lr, lr_duals and both beta above 0 and box at least 0; got "
                f"{self.steps}, {self.lr:g}, {self.lr_duals:g}, {self.beta} and {self.box:g}"
            )

    def check(self, start: Candidates) -> None:
        if start.seen.start is None:
            raise ThreatModelError(
                "KnownStart explains the change of the weights and needs those at which the training began, which are "
                "not known: give them (`start`), or use an attack on the released weights alone"
            )
        need_change(start.seen)

    def init(self, start: Candidates) -> SimpleState:
        images = start.images.detach().to(start.like).clone()
        duals = _first_duals(start, self.beta[0])
        size = duals.square().mean().sqrt().clamp(min=torch.finfo(duals.dtype).tiny)
        groups: list[dict[str, object]] = [
            {"params": [images], "lr": self.lr},
            {"params": [duals], "lr": self.lr_duals * float(size)},
        ]
        return SimpleState([start], images=images, duals=duals, optimizer=torch.optim.Adam(groups))

    def step(self, state: SimpleState) -> None:
        [start] = state.observations
        images, duals, optimizer = state["images"], state["duals"], state["optimizer"]
        beta = self.beta[0] * (self.beta[1] / self.beta[0]) ** (state.step / max(self.steps - 1, 1))
        pixels, multipliers = images.detach().requires_grad_(), duals.detach().requires_grad_()
        residual = duality_residual(start.seen, start.seen.with_known(pixels, start.labels)[0], multipliers, beta)
        outside = (pixels - pixels.clamp(0, 1)).square().sum()
        loss = residual + self.box * outside
        images.grad, duals.grad = torch.autograd.grad(loss, (pixels, multipliers))
        optimizer.step()
        state.note([float(loss.detach())], residual=[float(residual.detach())], outside=[float(outside.detach())])

    def result(self, state: SimpleState) -> Reconstruction:
        [start] = state.observations
        seen = start.seen
        raised = state["duals"].sum(dim=0)[seen.n_known :]
        labels = named_labels(seen.task, raised)
        images = seen.with_known(state["images"], start.labels)[0]
        residual = duality_residual(seen, images, state["duals"], beta=self.beta[1])
        notes = tuple(unsmoothed(seen))
        return Reconstruction(state["images"], labels.to(start.labels.device), float(residual), notes=notes)


def duality_residual(seen: ReleasedModel, images: Tensor, duals: Tensor, beta: float | None = None) -> Tensor:
    """Squared distance of the change of the weights from the gradients' combination, relative to the change's square.

    Of both, what is parallel to the start is left out where weight decay has shrunk it, or may have.

    Args:
        seen: with its start.
        images: `(m, c, h, w)`, the known ones among them.
        duals: multipliers `(2, m, k)` of the outputs' gradients at the first and at the last weights.
        beta: sharpness of the softplus in the place of ReLU; None: ReLU.
    """
    change = _change(seen)
    return (change - _combination(seen, images, duals, beta)).square().sum() / change.square().sum()


def _combination(seen: ReleasedModel, images: Tensor, duals: Tensor, beta: float | None) -> Tensor:
    """The sum `(p,)` of the gradients times their multipliers, see `duality_residual`."""
    network, (first, last) = smoothed(seen.model, beta), _both(seen)

    def outputs(weights: Mapping[str, Tensor], own: Tensor) -> Tensor:
        total: Tensor = (own * functional_call(network, dict(weights), (images,))).sum()
        return total

    early: Weights = grad(outputs)(first, duals[0])
    late: Weights = grad(outputs)(last, duals[1])
    return _beside_start(seen, flatten(early) + flatten(late))


def _change(seen: ReleasedModel) -> Tensor:
    """The change `(p,)` of the weights, see `duality_residual`."""
    first, last = _both(seen)
    return _beside_start(seen, flatten(last) - flatten(first))


def _beside_start(seen: ReleasedModel, vectors: Tensor) -> Tensor:
    """The part of vectors `(..., p)` that is orthogonal to the start; all of them without weight decay.

    By what factor the decay shrinks the start, the weights do not tell.
    """
    if seen.weight_decay == 0:
        return vectors
    start = F.normalize(flatten(_both(seen)[0]), dim=0)
    return vectors - (vectors @ start)[..., None] * start


def _first_duals(start: Candidates, beta: float) -> Tensor:
    """Multipliers `(2, m, k)` of known and first images: the best ones, or by labels if those take too much memory."""
    seen = start.seen
    images, labels = seen.with_known(start.images.detach().to(start.like), start.labels.to(start.like.device))
    with torch.no_grad():
        k = seen.outputs(seen.weights, images[:1]).shape[1]
        if 2 * len(images) * k * sum(weight.numel() for weight in seen.weights.values()) <= _MOST_NUMBERS:
            return solve_duals(seen, images, beta)
        signed = signs(labels, images)[:, None] if k == 1 else F.one_hot(labels, k).to(images) - 1 / k
        duals, change = signed.expand(2, -1, -1), _change(seen)
        direction = _combination(seen, images, duals, beta)
        return duals * (change.dot(direction).abs() / direction.dot(direction))


def solve_duals(seen: ReleasedModel, images: Tensor, beta: float | None = None) -> Tensor:
    """The multipliers `(2, m, k)` that fit the change of the weights best, by least squares."""
    network, (first, last) = smoothed(seen.model, beta), _both(seen)

    def gradients(weights: Mapping[str, Tensor]) -> Tensor:
        def outputs(own: Mapping[str, Tensor], image: Tensor) -> Tensor:
            result: Tensor = functional_call(network, dict(own), (image[None],))[0]
            return result

        parts: Weights = vmap(jacrev(outputs), (None, 0))(weights, images)
        return torch.cat([part.flatten(2) for part in parts.values()], dim=2)  # (m, k, p)

    columns = _beside_start(seen, torch.stack([gradients(first), gradients(last)]))
    solution = least_squares(columns.flatten(0, 2).T, _change(seen)[:, None])
    duals: Tensor = solution.view(columns.shape[:3])
    return duals


def smoothed(model: nn.Module, beta: float | None) -> nn.Module:
    """A copy of the network with softplus of this sharpness in the place of its ReLU modules; None: itself."""
    if beta is None:
        return model
    # The copy shares parameters and buffers.
    network = copy.deepcopy(model, {id(part): part for part in (*model.parameters(), *model.buffers())})
    replace_relu(network, lambda: nn.Softplus(beta))
    return network


def _both(seen: ReleasedModel) -> tuple[Weights, Weights]:
    assert seen.start is not None
    like = seen.like
    return {name: seen.start[name].to(like) for name in seen.weights}, seen.weights
