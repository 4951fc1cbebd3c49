"""A ReLU network whose ReLUs' outputs and features may be overwritten, for one image."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lit_recon.attacks.updates.feature_maps.convolutions import Convolution, find_convolutions
from lit_recon.clients.gradient import PureBatchNorm, pure_copy
from lit_recon.errors import UnsupportedModelError
from lit_recon.records import Observation

#: Norms whose derivative depends on the image.
_OWN_STATISTICS = (nn.GroupNorm, nn.LayerNorm, nn.InstanceNorm2d)


class _Overwritten(torch.autograd.Function):
    """The given values in place of a ReLU's output; derivatives pass where `active` is 1."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, values: Tensor, active: Tensor) -> Tensor:
        ctx.save_for_backward(active)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *derivatives: Any) -> Any:
        (active,) = ctx.saved_tensors
        return derivatives[0] * active, None, None


def overwritten(inputs: Tensor, values: Tensor, active: Tensor) -> Tensor:
    """`values` in place of a function of `inputs` whose derivative is `active`, all of one shape."""
    found: Tensor = _Overwritten.apply(inputs, values.to(inputs), active.to(inputs))  # type: ignore[no-untyped-call]
    return found


@dataclass(frozen=True)
class Step:
    """A ReLU and the convolution that leads to it.

    Attributes:
        relu: number of the ReLU's call.
        convolution: the last convolution with a kernel of the largest size before it.
        before: number of the ReLU whose output is the convolution's input.
        bias: name of the parameter, of the convolution or of the norm behind, whose gradient times `gain` is the sum
            over places of the derivative in the convolution's output; None: there is none.
        gain: `(channels,)`.
    """

    relu: int
    convolution: Convolution
    before: int
    bias: str | None
    gain: Tensor


class ReluNetwork:
    """The public model for one image, with ReLUs whose outputs may be overwritten, and features that may be known.

    Args:
        observation: of the victim.
        linear: name of the linear layer whose input the features are.

    Raises:
        UnsupportedModelError: no convolution between two ReLU modules, or a norm with statistics of the image.
    """

    def __init__(self, observation: Observation, linear: str) -> None:
        self._model = pure_copy(observation.model, "eval")
        for name, module in self._model.named_modules():
            fixed = not isinstance(module, PureBatchNorm) or module.mode == "eval"
            if not fixed or isinstance(module, _OWN_STATISTICS):
                raise UnsupportedModelError(
                    f"{name} has statistics of the image: maps are found from the last layer to the first behind norms "
                    "with fixed statistics alone"
                )
        self._loss = observation.loss
        public = {**observation.parameters, **observation.buffers}
        self._public = {name: value.detach().cpu() for name, value in public.items()}
        self._double = {k: v.double() if v.is_floating_point() else v for k, v in self._public.items()}
        self._model.cpu()
        with torch.no_grad():  # thousands of calls in single precision need no weights handed over
            for name, value in [*self._model.named_parameters(), *self._model.named_buffers()]:
                value.copy_(self._public[name])
        self.features: Tensor | None = None
        self.given: dict[int, tuple[Tensor, Tensor]] = {}
        self._variable: dict[int, Tensor] = {}
        self._first = 0  # ReLU before which convolutions are not computed
        self._calls = 0
        self.relus: list[Tensor] = []
        self.outputs: dict[str, Tensor] = {}
        self.read: Tensor | None = None
        self._inputs: dict[str, Tensor] = {}
        self._behind: dict[str, int] = {}
        self._blank: dict[str, Tensor] = {}
        self._layers = {layer.name: layer for layer in find_convolutions(observation)}
        for name, module in self._model.named_modules():
            if isinstance(module, nn.ReLU):
                module.register_forward_hook(lambda _, given, out: self._leave(given[0], out))
            elif name in self._layers:
                owner: Any = module
                owner.forward = self._skipping(name, owner.forward)
        self._model.get_submodule(linear).register_forward_pre_hook(lambda _, given: self._enter(given[0]))
        generator = torch.Generator().manual_seed(0)
        self.image = torch.rand(1, *observation.image_shape, generator=generator)
        self.steps = self._found_steps(observation)
        if not self.steps:
            raise UnsupportedModelError(
                "no convolution of the model has the output of a ReLU as its input and a ReLU behind it: maps are "
                "found from the last layer to the first in ReLU networks alone"
            )

    def _skipping(self, name: str, forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def call(inputs: Tensor) -> Tensor:
            if self._behind.get(name, self._first) < self._first and name in self._blank:
                return self._blank[name].to(inputs.dtype)
            output = forward(inputs)
            if torch.is_grad_enabled() and not output.requires_grad:
                output.requires_grad_()  # where nothing before it was computed
            self._inputs[name], self.outputs[name] = inputs, output
            return output

        return call

    def _leave(self, inputs: Tensor, output: Tensor) -> Tensor:
        number, self._calls = self._calls, self._calls + 1
        if number in self._variable:
            output = self._variable[number]
        elif number in self.given:
            values, active = self.given[number]
            output = overwritten(inputs, values[None], active[None])
        self.relus.append(output)
        return output

    def _enter(self, features: Tensor) -> Tensor | None:
        self.read = features
        if self.features is None:
            return None
        values = self.features.to(features.dtype).view_as(features)
        return overwritten(features, values, torch.ones_like(values))

    def __call__(self, images: Tensor) -> Tensor:
        """Logits; the outputs of ReLUs are in `relus` then, what the linear layer reads in `read`."""
        self._calls, self.relus = 0, []
        if images.dtype == torch.float64:
            logits: Tensor = torch.func.functional_call(self._model, self._double, (images,))
        else:
            logits = self._model(images)
        return logits

    def _found_steps(self, observation: Observation) -> list[Step]:
        """Steps from the last ReLU to the first."""
        order: list[str | int] = []
        handles = [
            module.register_forward_hook(
                lambda *_, name=name: order.append(name if name in self._layers else self._calls - 1)
            )
            for name, module in self._model.named_modules()
            if name in self._layers or isinstance(module, nn.ReLU)
        ]
        gains = self._gains(observation)
        leaves = {name: self._double[name].clone().requires_grad_() for name in gains}
        image = self.image.double().requires_grad_()
        logits: Tensor = torch.func.functional_call(self._model, {**self._double, **leaves}, (image,))
        for handle in handles:
            handle.remove()
        numbers, waiting = {output.data_ptr(): number for number, output in enumerate(self.relus)}, list[str]()
        chosen: dict[int, str] = {}
        for entry in order:
            if isinstance(entry, str):
                waiting.append(entry)
                continue
            for name in waiting:
                self._behind[name], self._blank[name] = entry, torch.zeros_like(self.outputs[name].detach())
            shape = self.relus[entry].shape
            fit = [n for n in waiting if self.outputs[n].shape == shape and self._inputs[n].data_ptr() in numbers]
            if fit:
                chosen[entry] = max(fit, key=lambda name: math.prod(self._layers[name].kernel))
            waiting = []
        wanted = [*leaves.values(), *(self.outputs[name] for name in chosen.values())]
        found = torch.autograd.grad(logits.square().sum(), wanted, allow_unused=True, materialize_grads=True)
        biases, derivatives = dict(zip(leaves, found, strict=False)), found[len(leaves) :]
        steps = []
        for (relu, name), derivative in zip(chosen.items(), derivatives, strict=True):
            sums, none = derivative.sum((0, 2, 3)), torch.ones(self._layers[name].channels, dtype=torch.float64)
            same = (b for b, own in biases.items() if own.shape == sums.shape and torch.allclose(own * gains[b], sums))
            bias = next(same, None) if sums.any() else None
            before = numbers[self._inputs[name].data_ptr()]
            steps.append(Step(relu, self._layers[name], before, bias, none if bias is None else gains[bias]))
        return steps[::-1]

    def _gains(self, observation: Observation) -> dict[str, Tensor]:
        """By name of a bias behind or in a convolution: derivative of its output in that of the convolution."""
        gains: dict[str, Tensor] = {}
        for name, module in self._model.named_modules():
            if f"{name}.bias" not in observation.parameters:
                continue
            if name in self._layers:
                gains[f"{name}.bias"] = torch.ones_like(self._double[f"{name}.bias"])
            elif isinstance(module, PureBatchNorm):
                scale = (self._double[f"{name}.running_var"] + module.eps).rsqrt()
                gains[f"{name}.bias"] = scale * self._double.get(f"{name}.weight", torch.ones_like(scale))
        return gains

    def decides(self, number: int) -> bool:
        """Whether the features depend on the image through the output of this ReLU alone."""
        image = self.image.double()
        with torch.no_grad():
            self(image)
            own = self.relus[number].detach()
            read = []
            for one in (image, 1 - image):
                self.given = {number: (own[0], torch.ones_like(own[0]))}
                self(one)
                assert self.read is not None
                read.append(self.read)
        self.given = {}
        return float((read[0] - read[1]).abs().max()) < 1e-9 * float(read[0].abs().max())

    def activations(self, images: Tensor) -> list[Tensor]:
        """Outputs of all ReLUs, float64 `(c, h, w)` or of other shapes, of images `(1, c, h, w)`."""
        self.given, self._first = {}, 0
        with torch.no_grad():
            self(images.detach().cpu().float())
        return [output[0].double() for output in self.relus]

    def from_map(self, number: int, values: Tensor) -> list[Tensor]:
        """Outputs `(1, ...)` of the ReLUs from one on whose output is replaced by `(1, c, h, w)`; differentiable."""
        self.given, self._variable, self._first = {}, {number: values}, number + 1
        features, self.features = self.features, None
        try:
            self(self.image.to(values.dtype))
        finally:
            self._variable, self._first, self.features = {}, 0, features
        return self.relus

    def derivative(self, step: Step, active: Mapping[int, Tensor], shapes: Sequence[Tensor], labels: Tensor) -> Tensor:
        """Derivative of the loss in the output of a step's convolution, were its ReLU's outputs all active.

        `active` holds the active entries of all ReLUs behind, `shapes` any values of the outputs of all ReLUs.
        """
        self.given = {number: (shapes[number], active[number]) for number in active if number > step.relu}
        self.given[step.relu] = (shapes[step.relu], torch.ones_like(shapes[step.relu]))
        self._first = step.relu
        try:
            logits = self(self.image.double().requires_grad_())
            return torch.autograd.grad(self._loss(logits, labels), self.outputs[step.convolution.name])[0][0]
        finally:
            self.given, self._first = {}, 0
