"""Does the GPU compute what the CPU computes? Updates, derivatives, images of a U-Net, and reconstructions."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import lit_recon._torchvision

import torch
from torch import Tensor

from benchmarks.gpu.device import tensor_float
from benchmarks.gpu.plan import Plan, attempt
from benchmarks.record import Row
from lit_recon.attacks.base import Execution
from lit_recon.attacks.updates import DeepImagePrior, GradientMatching, KnownLabels, MatchingState, TotalVariation
from lit_recon.clients import BatchNormMode, Client
from lit_recon.data.sources import Digits
from lit_recon.metrics.fidelity import rmse
from lit_recon.models import Backbone, ConvNet, ResNet18
from lit_recon.records import Knowledge, Normalization

#: A device agrees if its float32 is at most this many times as far from float64 as the CPU's, or closer than this. TF32
#: is several times farther. Networks with ReLU are not smooth: now and then a rounding error makes a derivative jump,
#: so that what rounding of the candidates changes is allowed, too: the most of so many draws.
FACTOR, FLOOR, ROUNDINGS = 10.0, 1e-4, 4

Form = Literal["loop", "vmap", "recorded loop", "recorded vmap"]


@dataclass(frozen=True)
class Subject:
    """A model under attack, two clients' private batches, and candidates for each.

    Attributes:
        name: for the record.
        model: in float32 on the CPU.
        batch_norm: of the clients.
        images, candidates: `(2, n, c, h, w)` in [0, 1].
        labels: of both clients, `(n,)` in rising order.
        steps: iterations of the compared reconstruction.
    """

    name: str
    model: Backbone
    batch_norm: BatchNormMode
    images: Tensor
    candidates: Tensor
    labels: Tensor
    steps: int

    def start(self, device: str, dtype: torch.dtype, form: Form) -> tuple[GradientMatching, MatchingState]:
        """An attack on both clients on a device."""
        client = Client(copy.deepcopy(self.model).to(device, dtype), self.batch_norm)
        labels = self.labels.to(device)
        seen = [client.observe(images.to(device, dtype), labels, Knowledge(labels=True)) for images in self.images]
        execution: Execution = "vmap" if form.endswith("vmap") else "loop"
        attack = GradientMatching(
            priors=[TotalVariation(0.01)],
            labels=KnownLabels(),
            steps=self.steps,
            execution=execution,
            compilation="auto" if form.startswith("recorded") else "none",
        )
        return attack, attack.init(seen)


def subjects(plan: Plan) -> list[Subject]:
    """The digits under a ConvNet, and ResNet-18 at batch 2."""
    torch.manual_seed(0)
    digits, _ = Digits().load()
    chosen = torch.stack([digits.labels.eq(label).nonzero()[:2, 0] for label in (3, 8)], dim=1)
    small = Backbone(ConvNet(digits.image_shape), digits.n_classes, Normalization((0.3,), (0.38,)))
    large = Backbone(ResNet18(width=plan.sizes.width), 10, Normalization((0.49, 0.48, 0.45), (0.25, 0.24, 0.26)))
    real = torch.stack([digits.pixels(indices) for indices in chosen])
    noise = torch.rand(2, 2, 3, 32, 32)
    return [
        Subject(
            "ConvNet, digits", small, "eval", real, torch.rand_like(real), torch.tensor([3, 8]), plan.sizes.steps[0]
        ),
        Subject(
            "ResNet-18, 32x32", large, "train", noise, torch.rand_like(noise), torch.tensor([3, 8]), plan.sizes.steps[1]
        ),
    ]


def agreement(plan: Plan) -> Iterator[Row]:
    """Distances from float64 on the CPU, and from the CPU's reconstructions."""
    forms: tuple[Form, ...] = ("loop", "vmap")
    if plan.on_gpu:
        forms = (*forms, "recorded loop", "recorded vmap")
    for subject in subjects(plan):
        exact = computed(subject, "cpu", torch.float64, "loop")
        cpu = distances(computed(subject, "cpu", torch.float32, "loop"), exact)
        rounded = moved_by_rounding(subject, exact)
        allowed = {name: max(FACTOR * value, FLOOR, rounded[name]) for name, value in cpu.items()}
        about: Row = {"subject": subject.name, "device": plan.device}
        yield {**about, "device": "cpu", "from_float64": cpu, "moved_by_rounding": rounded}
        for form in forms:
            yield attempt(
                plan, {**about, "form": form}, 5, partial(compared, subject, plan.device, form, exact, allowed)
            )
        if plan.on_gpu:
            with tensor_float(True):
                found = distances(computed(subject, plan.device, torch.float32, "loop"), exact)
            yield {**about, "form": "loop", "arithmetic": "tf32", "from_float64": found}
        yield attempt(plan, {**about, "steps": subject.steps}, 10, partial(reconstructions, subject, plan.device))
    yield from prior_agreement(plan)


def prior_agreement(plan: Plan) -> Iterator[Row]:
    """The same of the deep image prior's images and derivative."""
    about: Row = {"subject": "deep image prior"}
    seen = subjects(plan)[1]
    exact = drawn(seen, "cpu", torch.float64, records=False)
    cpu = distances(drawn(seen, "cpu", torch.float32, records=False), exact)
    allowed = {name: max(FACTOR * value, FLOOR) for name, value in cpu.items()}
    yield {**about, "device": "cpu", "from_float64": cpu}
    for records in (False, True) if plan.on_gpu else (False,):
        form = {"device": plan.device, "form": "recorded" if records else "loop"}
        run = partial(drawn, seen, plan.device, torch.float32, records)
        yield attempt(plan, {**about, **form}, 5, lambda run=run: judged(run(), exact, allowed))


def compared(subject: Subject, device: str, form: Form, exact: dict[str, Tensor], allowed: dict[str, float]) -> Row:
    """Distances of a device's float32 from float64, and whether they are allowed."""
    return judged(computed(subject, device, torch.float32, form), exact, allowed)


def judged(found: dict[str, Tensor], exact: dict[str, Tensor], allowed: dict[str, float]) -> Row:
    """Distances from float64, and whether they are allowed."""
    apart = distances(found, exact)
    return {"from_float64": apart, "agrees": all(value <= allowed[name] for name, value in apart.items())}


def moved_by_rounding(subject: Subject, exact: dict[str, Tensor]) -> dict[str, float]:
    """How far float64 moves at most when candidates move as rounding to float32 moves them."""
    most, generator = dict.fromkeys(exact, 0.0), torch.Generator().manual_seed(0)
    candidates = subject.candidates.double()
    for _ in range(ROUNDINGS):
        noise = torch.randn(candidates.shape, generator=generator, dtype=torch.float64)
        moved = replace(subject, candidates=candidates * (1 + torch.finfo(torch.float32).eps / 2 * noise))
        for name, value in distances(computed(moved, "cpu", torch.float64, "loop"), exact).items():
            most[name] = max(most[name], value)
    return most


def computed(subject: Subject, device: str, dtype: torch.dtype, form: Form) -> dict[str, Tensor]:
    """Both clients' loss and its derivative, and the first client's update, in float64 on the CPU."""
    _, state = subject.start(device, dtype, form)
    candidates = subject.candidates.to(device, dtype)
    labels = torch.stack([problem.labels for problem in state.problems])
    which = range(len(candidates))
    if form.startswith("recorded"):  # with other images than it is asked about
        state.matching(torch.rand_like(candidates), labels, which)
    evaluation = state.matching(candidates, labels, which)
    _require_recorded(state.matching.refused)
    update = torch.cat([value.flatten() for value in state.problems[0].restart.observation.update.values()])
    parts = {"update": update, "matching": evaluation.matching, "derivative": evaluation.images}
    return {name: value.detach().double().cpu() for name, value in parts.items()}


def drawn(subject: Subject, device: str, dtype: torch.dtype, records: bool) -> dict[str, Tensor]:
    """Images of a U-Net for the first client, and the derivative of their sum along a direction in all weights."""
    _, state = subject.start(device, dtype, "loop")
    restart, prior = state.problems[0].restart, DeepImagePrior()
    prior.records = records
    variables = {name: value.to(dtype) for name, value in prior.start(restart).items()}
    along = subject.candidates[0].to(device, dtype) - 0.5
    for scale in (0.9, 1.0):  # recorded with other weights than it is asked about
        leaves = {name: (scale * value).requires_grad_() for name, value in variables.items()}
        images = prior.images(leaves, restart)
        gradients = torch.autograd.grad(images, list(leaves.values()), along)
    _require_recorded(prior.refused)
    parts = {"images": images, "derivative": torch.cat([value.flatten() for value in gradients])}
    return {name: value.detach().double().cpu() for name, value in parts.items()}


def _require_recorded(refused: set[str]) -> None:
    if refused:
        raise RuntimeError(f"not recorded: {sorted(refused)}")


def distances(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """Relative Euclidean distance of each part."""
    return {name: float((found[name] - value).norm() / value.norm()) for name, value in exact.items()}


def reconstructions(subject: Subject, device: str) -> Row:
    """The same attack on CPU and device from the same start: how far the images part, and how good each is."""
    images, error, loss = {}, {}, {}
    for place in dict.fromkeys(("cpu", device)):
        attack, state = subject.start(place, torch.float32, "recorded loop")  # on a CPU nothing is recorded
        while state.step < attack.steps:
            attack.advance(state)
        results = attack.result(state)
        images[place] = torch.cat([result.images for result in results]).cpu()
        error[place] = float(rmse(images[place], subject.images.flatten(0, 1)).mean())
        loss[place] = sum(result.loss for result in results) / len(results)
    apart = float(rmse(images[device], images["cpu"]).mean())
    return {"rmse_between": apart, "rmse_to_truth": error, "matching_loss": loss}
