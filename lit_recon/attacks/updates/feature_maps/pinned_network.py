"""The public model with known maps in it, and the norms of the maps that were recovered first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lit_recon.attacks.updates.feature_maps.convolutions import Convolution, find_convolutions
from lit_recon.attacks.updates.feature_maps.equations import Known, Statistics
from lit_recon.attacks.updates.labels.head import find_head, order_labels
from lit_recon.clients import LocalSteps
from lit_recon.clients.aggregate import one_client
from lit_recon.clients.gradient import PureBatchNorm, pure_copy
from lit_recon.defenses.base import Stage
from lit_recon.records import Observation

#: Largest relative residual of the head's gradient at which the norms of the maps count as found.
SCALED = 1e-4
#: Largest relative error of norms that are found with a factor; and of the head's gradient, that of rounding.
_TOLD, _ROUNDING = 1e-3, 1e-6


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

    def head_gradient(self, names: Sequence[str], labels: Tensor) -> Tensor:
        """Gradient of the mean loss in the weights of the head, and in its bias as a last column if that is named."""
        parameters = [self._public[name].requires_grad_() for name in names]
        gradients = torch.autograd.grad(self._loss(self(), labels), parameters)
        for parameter in parameters:
            parameter.requires_grad_(False)
        return torch.cat([one.view(len(one), -1) for one in gradients], dim=1)

    def record_input(self, layer: str) -> list[Tensor]:
        """A list that receives the input of a linear layer at every forward pass."""
        received: list[Tensor] = []
        self._model.get_submodule(layer).register_forward_pre_hook(lambda _, given: received.append(given[0].detach()))
        return received


class MeasuredMaps(NamedTuple):
    """Maps `(n, c, h, w)` with their norms, labels `(n,)` in the same order, and the factor that scales the update."""

    maps: Tensor
    labels: Tensor
    scale: float


def measured_maps(
    observation: Observation, network: PinnedNetwork, layer: str, directions: Tensor, labels: Tensor
) -> MeasuredMaps | None:
    """Maps with their norms, and labels in the same order, such that the head has its observed gradient.

    Clipping scales the whole update: its factor is a further unknown where the defense is known to do so, and, where no
    defense is known, if no norms explain the gradient without one.

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

    weight, bias = find_head(observation, "feature maps")
    # the bias tells a factor and norms apart
    told = bias is not None and bias in observation.update and bool(observation.update[bias].any())
    names = [weight, bias] if told and bias else [weight]
    seen = [observation.update[name].detach().cpu().double() for name in names]
    target, n = torch.cat([value.view(len(value), -1) for value in seen], dim=1), len(directions)
    received = network.record_input(weight.rpartition(".")[0])

    def place(logs: Any) -> Tensor:
        network.given = {layer: directions * torch.as_tensor(logs).exp().view(-1, 1, 1, 1)}
        return network.given[layer]

    def assigned(scaled: bool) -> Tensor:
        with torch.no_grad():
            probabilities = network().softmax(dim=1)
        return order_labels(received[-1], 0.0 if scaled else probabilities, seen[0], labels)

    def misfit(order: Tensor, scaled: bool) -> tuple[Tensor, float]:
        gradient = network.head_gradient(names, order)
        scale = float((gradient * target).sum() / gradient.square().sum()) if scaled else 1.0
        return (scale * gradient - target) / target.norm(), scale

    def fitted(scaled: bool) -> MeasuredMaps | None:
        trials = []
        for factor in torch.linspace(-1.5, 1.5, 9, dtype=torch.float64).tolist():
            logs = torch.full((n,), usual + factor, dtype=torch.float64)
            place(logs)
            order = assigned(scaled)
            trials.append((float(misfit(order, scaled)[0].norm()), logs, order))
        _, logs, order = min(trials, key=lambda trial: trial[0])
        for _ in range(3):

            def residual(logs: Any, order: Tensor = order) -> Any:
                place(logs)
                return misfit(order, scaled)[0].flatten().numpy()

            found = least_squares(residual, logs, method="trf", xtol=1e-12, ftol=1e-12, gtol=1e-12, max_nfev=20)
            logs = torch.as_tensor(found.x)
            maps, previous = place(logs), order
            order = assigned(scaled)
            if not torch.equal(order, previous):
                continue
            left, scale = misfit(order, scaled)
            # where norms hardly change the fit, any would do with some factor
            steepness = float(torch.linalg.svdvals(torch.as_tensor(found.jac))[-1])
            known = not scaled or max(float(left.norm()), _ROUNDING) < _TOLD * steepness
            explained = float(left.norm()) < SCALED and scale > 0 and known
            return MeasuredMaps(maps, order, scale) if explained else None
        return None

    with torch.no_grad():
        network.given = {}
        network()
    usual = float(network.inputs[layer].flatten(1).norm(dim=1).median().log())
    before = list(network.inputs)
    network.skipped = set(before[: before.index(layer)])
    try:
        tried = (fitted(scaled) for scaled in _factors(observation, weight))
        return next((one for one in tried if one is not None), None)
    finally:
        network.skipped = set()


def _factors(observation: Observation, weight: str) -> tuple[bool, ...]:
    """Whether the update may be scaled as a whole, in the order to try."""
    defense, (rule, _) = observation.defense, one_client(observation.operator)
    if isinstance(rule, LocalSteps):  # which may have rates of their own for layers
        return (False,)
    if defense is None:
        return (False, True)
    acts = {Stage.PER_EXAMPLE, Stage.UPDATE} & set(defense.stages)
    return (bool(acts) and defense.largest_hidden(observation.update)[weight] == 0,)
