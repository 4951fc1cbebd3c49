"""A small attack of the tests' own: it descends on the gradient of the training loss with weight decay."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from lit_recon.attacks.base import SimpleState
from lit_recon.attacks.trainset.base import Candidates, TrainsetAttack
from lit_recon.attacks.trainset.training import losses
from lit_recon.errors import ThreatModelError
from lit_recon.records import Reconstruction


@dataclass(frozen=True)
class SmallAttack(TrainsetAttack):
    steps: int = 3
    lr: float = 0.1
    max_loss: float = 1.0

    def check(self, start: Candidates) -> None:
        if start.seen.loss is None or start.seen.loss > self.max_loss:
            raise ThreatModelError(f"the training loss must be at most {self.max_loss:g}; got {start.seen.loss}")

    def init(self, start: Candidates) -> SimpleState:
        return SimpleState([start], images=start.images.clone().requires_grad_())

    def _residual(self, state: SimpleState) -> torch.Tensor:
        [start] = state.observations
        weights = {name: weight.clone().requires_grad_() for name, weight in start.seen.weights.items()}
        outputs = start.seen.outputs(weights, state["images"])
        loss = losses(start.seen.task, outputs, start.labels).mean()
        parts = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        return torch.stack([part.square().sum() for part in parts]).sum()

    def step(self, state: SimpleState) -> None:
        residual = self._residual(state)
        (gradient,) = torch.autograd.grad(residual, [state["images"]])
        with torch.no_grad():
            state["images"].sub_(gradient, alpha=self.lr)
        state.note([residual], residual=[residual])

    def result(self, state: SimpleState) -> Reconstruction:
        [start] = state.observations
        return Reconstruction(state["images"].detach(), start.labels, float(self._residual(state).detach()))


class Biased(torch.nn.Module):
    """A network with biases in all layers, which is not homogeneous."""

    def __init__(self, image_shape: tuple[int, int, int], n_outputs: int) -> None:
        super().__init__()
        n_pixels = math.prod(image_shape)
        self.layers = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(n_pixels, 8), torch.nn.ReLU(), torch.nn.Linear(8, n_outputs)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layers(images)
        return outputs
