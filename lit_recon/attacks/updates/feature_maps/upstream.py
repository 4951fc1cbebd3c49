"""Input maps of earlier convolutions from the known maps of a later one, layer by layer towards the images.

Once everything behind a convolution is known, its gradient gives equations for its input, see `equations`: they give
the input maps, with them the zeros of the ReLU before, and with these the derivative in the output of the convolution
before. R-GAP [Zhu2021] and R-CONV [Eltaras2024] go through a network in this way for
single images and from its head; here the start is a whole batch's maps of an inner layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lit_recon.attacks.updates.feature_maps.convolutions import Convolution, find_convolutions
from lit_recon.attacks.updates.feature_maps.equations import WRONG_ZEROS, Group, Known, Solved, Statistics
from lit_recon.attacks.updates.feature_maps.recovery import RecoveredMaps
from lit_recon.attacks.updates.labels.head import find_head, order_labels
from lit_recon.clients.gradient import PureBatchNorm, pure_copy
from lit_recon.defenses.base import Stage
from lit_recon.records import Observation
from lit_recon.solving import least_squares

#: Largest relative residual of the head's gradient at which the norms of the maps count as found.
_SCALED = 1e-4
#: Largest expected relative error of the maps of a layer for it to count as known.
_KNOWN = 1e-4
#: Largest number of unknowns of a layer's equations, positions times examples: seconds below, minutes above.
_LARGEST = 2048
#: Relative fall of the residual that shows that a changed zero was wrong.
_FALLS = 0.99


class PinnedNetwork:
    """The public model in double precision, in which known maps overwrite the inputs of convolutions.

    The tensor itself is overwritten, so that whatever else reads it, such as a shortcut, reads the known map, and the
    ReLU that wrote it has the derivatives that belong to the known map.

    Attributes:
        given: maps `(n, c, h, w)` by the name of the convolution.
        skipped: convolutions whose outputs are zeros like those of the last forward pass: maps overwrite what follows.
        inputs, outputs: of all plain convolutions in the last forward pass.
        norms: names of the norms of their outputs, by convolution, of those with statistics of the batch or example.
        normed: outputs of these norms in the last forward pass, by convolution.
    """

    def __init__(self, observation: Observation) -> None:
        self.convolutions: dict[str, Convolution] = {layer.name: layer for layer in find_convolutions(observation)}
        self._model = pure_copy(observation.model, observation.operator.batch_norm).double()
        public = {**observation.parameters, **observation.buffers}
        self._public = {name: v.cpu().double() if v.is_floating_point() else v.cpu() for name, v in public.items()}
        self._loss = observation.loss
        self.given: dict[str, Tensor] = {}
        self.skipped: set[str] = set()
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        self.norms: dict[str, str] = {}
        self.normed: dict[str, Tensor] = {}
        # any images: what they change is overwritten; noise, since BatchNorm divides by the deviation of constant ones
        shape = (observation.n_examples, *observation.image_shape)
        self.images = torch.rand(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        for name in self.convolutions:
            layer = self._model.get_submodule(name)
            layer.forward = partial(self._convolve, name, layer.forward)
            layer.register_forward_pre_hook(lambda _, given, name=name: self._enter(name, given[0]))
            layer.register_forward_hook(lambda _, given, returned, name=name: self.outputs.__setitem__(name, returned))
        for name, module in self._model.named_modules():
            if isinstance(module, nn.GroupNorm) or (isinstance(module, PureBatchNorm) and module.mode == "train"):
                module.register_forward_hook(lambda _, given, out, name=name: self._leave(name, given[0], out))

    def _enter(self, name: str, given: Tensor) -> None:
        if name in self.given:
            given.data.copy_(self.given[name])
        self.inputs[name] = given

    def _convolve(self, name: str, forward: Callable[[Tensor], Tensor], given: Tensor) -> Tensor:
        return given.new_zeros(self.outputs[name].shape) if name in self.skipped else forward(given)

    def _leave(self, norm: str, given: Tensor, returned: Tensor) -> None:
        for name, outputs in self.outputs.items():
            if outputs is given:
                self.norms[name], self.normed[name] = norm, returned

    def __call__(self, images: Tensor | None = None) -> Tensor:
        """Logits `(n, k)` of images, by default of noise."""
        given = self.images if images is None else images
        logits: Tensor = torch.func.functional_call(self._model, self._public, (given,))
        return logits

    def derivatives(self, labels: Tensor, layers: list[str]) -> list[Tensor]:
        """Derivatives of the mean loss in the outputs of layers, or behind their norms where these have statistics."""
        loss = self._loss(self(self.images.clone().requires_grad_()), labels)
        return list(torch.autograd.grad(loss, [self.normed.get(name, self.outputs[name]) for name in layers]))

    def known(self, observation: Observation, labels: Tensor, group: list[str]) -> list[Known]:
        """What is known about convolutions behind which all maps are given."""
        found = []
        for name, derivative in zip(group, self.derivatives(labels, group), strict=True):
            gradient = observation.update[f"{name}.weight"].detach().cpu().double()
            statistics = None
            if name in self.norms:
                module: Any = self._model.get_submodule(self.norms[name])
                statistics = Statistics(getattr(module, "num_groups", None), module.eps)
                if module.weight is not None:
                    derivative = derivative * self._public[f"{self.norms[name]}.weight"].view(1, -1, 1, 1)
            weight, bias = self._public[f"{name}.weight"], self._public.get(f"{name}.bias")
            found.append(Known(self.convolutions[name], weight, bias, gradient, derivative, statistics))
        return found

    def decides(self, name: str) -> bool:
        """Whether the logits depend on the images through the input of this convolution alone."""
        with torch.no_grad():
            self.given = {}
            self()
            self.given = {name: self.inputs[name].detach().clone()}
            logits, others = self(), self(1 - self.images)
        self.given = {}
        return float((logits - others).abs().max()) < 1e-9 * float(logits.abs().max())

    def head_gradient(self, weight: str, labels: Tensor) -> Tensor:
        """Gradient of the mean loss in the weights of the head."""
        parameter = self._public[weight].requires_grad_()
        gradient: Tensor = torch.autograd.grad(self._loss(self(), labels), parameter)[0]
        parameter.requires_grad_(False)
        return gradient

    def record_input(self, layer: str) -> list[Tensor]:
        """A list that receives the input of a linear layer at every forward pass."""
        received: list[Tensor] = []
        self._model.get_submodule(layer).register_forward_pre_hook(lambda _, given: received.append(given[0].detach()))
        return received


@dataclass
class KnownMaps:
    """Maps of several convolutions with their norms.

    Attributes:
        maps: `(n, c, h, w)` by layer, in the order in which they were found: the last one is nearest to the images.
        errors: their expected relative errors.
        labels: `(n,)`, in the order of the maps.
        stopped: why the convolution before was not solved.
    """

    maps: dict[str, Tensor]
    errors: dict[str, float]
    labels: Tensor
    stopped: str = ""


def without_scatter(directions: Tensor) -> tuple[Tensor, Tensor]:
    """Maps whose zeros are zero, and which entries are zero or may be."""
    scatter = float(directions.clamp_max(0).abs().max())
    doubtful = directions < 5 * scatter
    return torch.where(directions > 1.5 * scatter, directions, torch.zeros_like(directions)), doubtful


class MeasuredMaps(NamedTuple):
    """Maps `(n, c, h, w)` with their norms, labels `(n,)` in the same order, and the factor that scales the update."""

    maps: Tensor
    labels: Tensor
    scale: float


def measured_maps(
    observation: Observation, network: PinnedNetwork, layer: str, directions: Tensor, labels: Tensor
) -> MeasuredMaps | None:
    """Maps with their norms, and labels in the same order, such that the head has its observed gradient.

    Clipping scales the whole update: its factor is a further unknown where the defense is known to change updates, and
    where no norms explain the gradient without one.

    Args:
        observation: of the victim.
        network: of the same.
        layer: a convolution whose input decides the logits.
        directions: its maps, `(n, c, h, w)` of unit norm, zero where they vanish.
        labels: of the batch, in any order.

    Returns:
        None if no norms explain the gradient.
    """
    from scipy.optimize import least_squares

    weight, _ = find_head(observation, "feature maps")
    n, target = len(directions), observation.update[weight].detach().cpu().double()
    received = network.record_input(weight.rpartition(".")[0])

    def place(logs: Any) -> Tensor:
        network.given = {layer: directions * torch.as_tensor(logs).exp().view(-1, 1, 1, 1)}
        return network.given[layer]

    def assigned() -> Tensor:
        with torch.no_grad():
            probabilities = network().softmax(dim=1)
        return order_labels(received[-1], probabilities, target, labels)

    def misfit(order: Tensor, scaled: bool) -> tuple[Tensor, float]:
        gradient = network.head_gradient(weight, order)
        scale = float((gradient * target).sum() / gradient.square().sum()) if scaled else 1.0
        return (scale * gradient - target) / target.norm(), scale

    with torch.no_grad():
        network.given = {}
        network()
    usual = float(network.inputs[layer].flatten(1).norm(dim=1).median().log())
    names = list(network.inputs)
    network.skipped = set(names[: names.index(layer)])
    changed = observation.defense is not None and Stage.UPDATE in observation.defense.stages
    for scaled in (changed, not changed):
        trials = []
        for factor in torch.linspace(-1.5, 1.5, 9, dtype=torch.float64).tolist():
            logs = torch.full((n,), usual + factor, dtype=torch.float64)
            place(logs)
            order = assigned()
            trials.append((float(misfit(order, scaled)[0].norm()), logs, order))
        _, logs, order = min(trials, key=lambda trial: trial[0])
        for _ in range(3):

            def residual(logs: Any, order: Tensor = order, scaled: bool = scaled) -> Any:
                place(logs)
                return misfit(order, scaled)[0].flatten().numpy()

            found = least_squares(residual, logs, method="trf", xtol=1e-12, ftol=1e-12, gtol=1e-12, max_nfev=20)
            logs = torch.as_tensor(found.x)
            maps, previous = place(logs), order
            order = assigned()
            if torch.equal(order, previous):
                left, scale = misfit(order, scaled)
                if float(left.norm()) < _SCALED and scale > 0:
                    network.skipped = set()
                    return MeasuredMaps(maps, order, scale)
                break
    network.skipped = set()
    return None


def follow_upstream(
    observation: Observation, network: PinnedNetwork, start: RecoveredMaps, labels: Tensor
) -> KnownMaps | str:
    """Maps of the convolutions before `start`, as far as their equations determine them, or why there are none.

    Args:
        observation: of the victim; one gradient.
        network: of the same.
        start: recovered maps of a convolution whose input decides the logits.
        labels: of the batch, in any order.
    """
    layer = start.convolution.name
    directions, doubtful = without_scatter(start.maps)
    measured = measured_maps(observation, network, layer, directions, labels)
    if measured is None:
        return f"no norms of the maps of {layer} explain the head's gradient"
    known = KnownMaps({layer: measured.maps}, {layer: start.outside**0.5}, measured.labels)
    update = {name: value / measured.scale for name, value in observation.update.items()}
    observation = replace(observation, update=update)
    with torch.no_grad():
        network.given = {layer: known.maps[layer]}
        network()
    names = list(network.inputs)
    network.given = {name: network.inputs[name].detach().clone() for name in names[names.index(layer) :]}
    behind = _Behind([layer], doubtful)
    groups = _shared_inputs(network, names[: names.index(layer)])
    for group, before in zip(groups, [*groups[1:], []], strict=True):
        solved = _solved(observation, network, known.labels, group, behind)
        if isinstance(solved, Solved) and solved.error <= _KNOWN:
            network.given.update(dict.fromkeys(group, solved.maps))
            if any(name in network.norms for name in group):
                solved = _rescaled(observation, network, known.labels, group, before, solved)
        if isinstance(solved, str) or solved.error > _KNOWN:
            for name in group:
                network.given.pop(name, None)
            reason = solved if isinstance(solved, str) else f"expected relative error {solved.error:.1g}"
            known.stopped = f"{group[0]}: {reason}"
            return known
        network.given.update(dict.fromkeys(group, solved.maps))
        known.maps[group[0]], known.errors[group[0]] = solved.maps, solved.error
        behind = _Behind(group, solved.doubtful)
    return known


@dataclass(frozen=True)
class _Behind:
    """The convolutions whose input was found last, and entries `(n, c, h, w)` that are zero or may be."""

    group: list[str]
    doubtful: Tensor


def _shared_inputs(network: PinnedNetwork, names: list[str]) -> list[list[str]]:
    """The convolutions, grouped by their input tensor, last group first."""
    groups: dict[int, list[str]] = {}
    for name in names:
        groups.setdefault(network.inputs[name].data_ptr(), []).append(name)
    return list(groups.values())[::-1]


def _solved(
    observation: Observation, network: PinnedNetwork, labels: Tensor, group: list[str], behind: _Behind
) -> Solved | str:
    """The input of a group of convolutions, after zeros of the maps behind were corrected."""
    n, c, h, w = network.inputs[group[0]].shape
    layers = [network.convolutions[name] for name in group]
    equations, unknowns = sum(layer.channels * layer.kernel[0] * layer.kernel[1] for layer in layers), n * h * w
    if equations < unknowns:
        return f"{equations} equations for {unknowns} unknowns per channel"
    if unknowns > _LARGEST:
        return f"{unknowns} unknowns per channel, more than {_LARGEST}"

    def equal() -> Group:
        return Group(network.known(observation, labels, group), (n, c, h, w))

    equations_of = equal()
    if not equations_of.right.any():
        return "its gradient is zero"
    usual = network.inputs[group[0]].detach()
    start = equations_of.start(usual) if equations_of.depends else None
    fitted = equations_of.fit(equations_of.alike, start)
    if fitted is None:
        return "its equations do not determine every entry"
    maps = network.given[behind.group[0]]
    smallest = maps[maps > 0].min()

    def pin(positive: Tensor) -> None:
        renewed = torch.where(positive, maps.clamp_min(smallest), torch.zeros_like(maps))
        network.given.update(dict.fromkeys(behind.group, renewed))

    def switch(positive: Tensor) -> Group:
        pin(positive)
        return equal()

    positive = maps > 0
    on, off = (switch(positive | behind.doubtful), switch(positive & ~behind.doubtful))
    change = on.known[0].derivative - off.known[0].derivative
    for _ in range(WRONG_ZEROS):
        if change.shape != positive.shape:  # a layer between mixes entries
            break
        flips = torch.where(positive, -change, change)
        place = equations_of.wrong_zero(*fitted, flips)
        if place is None:
            break
        trial = positive.clone(memory_format=torch.contiguous_format)
        trial.view(-1)[place] ^= True
        renewed = switch(trial)
        better = renewed.fit(equations_of.alike, fitted[0] if renewed.depends else None, steps=2)
        if better is None or better[1].norm() > _FALLS * fitted[1].norm():
            break
        positive, equations_of, fitted = trial, renewed, better
    pin(positive)
    return equations_of.solve(fitted[0])


def _rescaled(
    observation: Observation,
    network: PinnedNetwork,
    labels: Tensor,
    group: list[str],
    before: list[str],
    solved: Solved,
) -> Solved | str:
    """Maps with the scales, hidden by the norms behind, at which biases of the norms before get their gradient.

    The derivative in the maps, and with it the gradient of the biases, is affine in the inverse scales.
    """
    biases = {name: f"{network.norms[name]}.bias" for name in before if name in network.norms}
    if not biases or any(bias not in observation.update for bias in biases.values()):
        return "a norm hides the scale of its input, and no bias before it shows it"
    seen = torch.cat([observation.update[bias].detach().cpu().double() for bias in biases.values()])
    sums = []
    for scale in (1.0, 2.0):
        network.given.update(dict.fromkeys(group, scale * solved.maps))
        derivatives = network.derivatives(labels, list(biases))
        sums.append(torch.cat([derivative.sum((2, 3)) for derivative in derivatives], dim=1))
    varying = 2 * (sums[0] - sums[1])
    fixed = seen - (sums[0] - varying).sum(0)
    statistics = [network.known(observation, labels, group)[0].statistics]
    columns = varying.T if statistics[0] is not None and statistics[0].groups is not None else varying.sum(0)[:, None]
    weights = torch.ones_like(fixed)
    for _ in range(20):
        inverse = least_squares(columns * weights[:, None], fixed * weights)
        residual = (columns @ inverse - fixed).abs()
        # a wrong zero spoils single channels
        weights = 1 / (residual + 1e-7 * fixed.abs().max()).sqrt()
    error = float(residual.median() / fixed.square().mean().sqrt())
    if not bool((inverse > 0).all()) or error > _SCALED:
        return "a norm hides the scale of its input, and the biases before it contradict each other"
    maps = solved.maps / inverse.view(-1, 1, 1, 1)
    return Solved(maps, max(solved.error, error), solved.doubtful)
