"""Updates of small clients, as a user's own system would send them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from lit_recon.clients import Client, GradientOperator
from lit_recon.clients.record import RecordedUpdate, Recorder
from lit_recon.defenses import Defense
from lit_recon.experiments.audit.evidence import read_evidence
from lit_recon.experiments.audit.interpretation import Interpretation, interpret
from lit_recon.models import public_model
from lit_recon.records import Batch, Normalization, Update, Weights

SHAPE = (1, 8, 8)
NORMALIZATION = Normalization((0.5,), (0.25,))
Loss = Callable[[Tensor, Tensor], Tensor]


def images(n: int, seed: int = 0) -> Tensor:
    """Smooth images in [0, 1]."""
    coarse = torch.rand(n, 1, 3, 3, generator=torch.Generator().manual_seed(seed))
    return nn.functional.interpolate(coarse, size=SHAPE[1:], mode="bilinear").clamp(0, 1)


def labels(n: int) -> Tensor:
    return torch.arange(n) * 3 % 10


def mlp(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def convnet(norm: bool = False, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    normed: list[nn.Module] = [nn.BatchNorm2d(8)] if norm else []
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        *normed,
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 20),
        nn.ReLU(),
        nn.Linear(20, 10),
    )


def trained(
    model: nn.Module,
    n: int,
    lr: float = 0.1,
    steps: int = 1,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    loss: Loss = nn.functional.cross_entropy,
) -> nn.Module:
    """A copy of the model after SGD on the first `n` images, in training mode."""
    after = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(after.parameters(), lr=lr, momentum=momentum, weight_decay=weight_decay)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(after((images(n) - 0.5) / 0.25), labels(n)).backward()
        optimizer.step()
    return after


def update(model: nn.Module, n: int, known: dict[str, object] | None = None, **how: object) -> RecordedUpdate:
    """New weights of a client, with true circumstances unless `known` says otherwise."""
    after = trained(model, n, **how)  # type: ignore[arg-type]  # of several types
    told: dict[str, object] = {"batch_size": n, "lr": 0.1, **(known or {})}
    return Recorder(model, **told).record(after, images=images(n), labels=labels(n))


def unlabelled(recorded: RecordedUpdate, sent: dict[str, Tensor]) -> RecordedUpdate:
    """The same circumstances, something else sent, and its form not told."""
    return RecordedUpdate(recorded.before, sent, None, recorded.known)


def interpreted(model: nn.Module, recorded: RecordedUpdate, defense: Defense | None = None) -> Interpretation:
    public = public_model(model, SHAPE, NORMALIZATION)
    return interpret(public, read_evidence(model, recorded), recorded.form, recorded.known, defense=defense)


def defended(model: nn.Module, n: int, defense: Defense) -> RecordedUpdate:
    """The gradient of a client with a defense."""
    client = Client(model, defense=defense, image_shape=SHAPE, normalization=NORMALIZATION)
    released = client.release(images(n), labels(n)).update
    return Recorder(model, batch_size=n, lr=0.1).record(released, form="gradient")


def gradient(model: nn.Module, n: int, mode: str = "eval") -> Update:
    """The true gradient of the mean loss."""
    public = public_model(model, SHAPE, NORMALIZATION).model
    operator = GradientOperator(public, mode)  # type: ignore[arg-type]  # a text
    return operator(Weights.of(public), Batch(images(n), labels(n)))


def doubts(found: Interpretation) -> list[str]:
    return [finding.text for finding in found.findings if finding.kind == "doubt"]
