"""The classifier's head in an observation: public parameters, released gradient, sign of its inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lit_recon.clients.aggregate import one_client
from lit_recon.clients.gradient import pure_copy
from lit_recon.clients.local_steps import LocalSteps
from lit_recon.errors import ThreatModelError, UnsupportedModelError
from lit_recon.models.layers import layers_with_weights
from lit_recon.records import BatchNormMode, Observation, Update
from lit_recon.solving import least_squares

#: Relative rounding error of a float32 gradient.
ROUNDING = 6e-8


def require_cross_entropy(observation: Observation, what: str, remedy: str) -> None:
    """Raise a `ThreatModelError`, with the method and the remedy, for another loss than the mean cross-entropy."""
    if observation.loss is not cross_entropy:
        name = getattr(observation.loss, "__name__", type(observation.loss).__name__)
        raise ThreatModelError(
            f"{what} assumes that clients minimize the mean cross-entropy, but their loss is {name}: {remedy}"
        )


def keeps_magnitudes(observation: Observation) -> bool:
    """Whether the update is a sum of gradients, as SGD's is; Adam's is little more than their signs."""
    return getattr(one_client(observation.operator)[0], "optimizer", "sgd") == "sgd"


def mean_gradient(update: Update, observation: Observation) -> Update:
    """A client's update in units of a gradient, also where it releases the difference of weights."""
    rule, _ = one_client(observation.operator)
    return rule.as_gradient(update) if isinstance(rule, LocalSteps) else update


def require_magnitudes(observation: Observation, what: str) -> None:
    """Raise a `ThreatModelError`, with the method and the remedy, for a client whose optimizer is Adam."""
    if not keeps_magnitudes(observation):
        raise ThreatModelError(
            f"{what} takes the update for a sum of gradients, but this client's optimizer is Adam, whose steps are "
            "little more than their signs: use GradientMatching without features"
        )


def linear_calls(
    observation: Observation,
    images: Tensor,
    batch_norm: BatchNormMode = "eval",
    replaced: Mapping[str, Tensor] | None = None,
) -> tuple[Tensor, dict[str, list[tuple[Tensor, Tensor]]]]:
    """Logits of the public model, and inputs and outputs of its linear layers by name, both in the order of calls.

    Layers whose weight is no parameter of theirs alone are left out: the update has no gradient of theirs. The inputs
    of some layers can be `replaced` by others, by the name of the layer.
    """
    model = pure_copy(observation.model, batch_norm)
    calls: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def note(name: str, given: Tensor, returned: Tensor) -> None:
        calls.setdefault(name, []).append((given, returned))

    for name, others in (replaced or {}).items():
        own = others.to(observation.like)
        model.get_submodule(name).register_forward_pre_hook(lambda _, given, own=own: (own,))
    for name, layer in layers_with_weights(model).items():
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(lambda _, given, returned, name=name: note(name, given[0], returned))
    public = {**observation.parameters, **observation.buffers}
    with torch.no_grad():
        logits = torch.func.functional_call(model, public, (images.to(next(iter(public.values()))),))
    return logits, calls


def find_head(observation: Observation, what: str) -> tuple[str, str | None]:
    """Parameter names of the head's weight and bias (None without one), which the method `what` needs.

    The head is the last linear layer that a forward pass calls once and whose output is the model's; without such a
    layer, an `UnsupportedModelError`.
    """
    images = torch.rand(2, *observation.image_shape, generator=torch.Generator().manual_seed(0))
    logits, calls = linear_calls(observation, images)
    heads = [name for name, seen in calls.items() if len(seen) == 1 and torch.equal(seen[0][1], logits)]
    if not heads:
        raise UnsupportedModelError(
            f"{what} needs the gradient of a torch.nn.Linear layer that returns the {observation.n_classes} logits; "
            f"{type(observation.model).__name__} has no such layer (linear layers with a weight of their own: "
            f"{', '.join(calls) or 'none'}): reveal the labels and use KnownLabels, or optimize them with JointLabels"
        )
    weight, bias = (f"{heads[-1]}.{part}".lstrip(".") for part in ("weight", "bias"))
    return weight, bias if bias in observation.parameters else None


def order_labels(inputs: Tensor, probabilities: Tensor | float, gradient: Tensor, labels: Tensor) -> Tensor:
    """Labels `(n,)` in the order of examples, from the gradient of the head's weights.

    The gradient is the mean over examples of (p_i - y_i) h_i^T, so that the indicators y_i of the labels solve a linear
    system; an assignment makes the solution robust to inexact inputs.

    Args:
        inputs: of the head, h, `(n, d)`.
        probabilities: p, `(n, k)`. 0 where an unknown factor, of each example its own, scales the gradient: of
            p_i - y_i only the entry of the label is negative.
        gradient: `(k, d)`, of the mean cross-entropy.
        labels: of the batch, in any order.
    """
    from scipy.optimize import linear_sum_assignment

    residuals = least_squares(inputs.T, len(labels) * gradient.T)
    indicators = probabilities - residuals
    rows, columns = linear_sum_assignment(-indicators[:, labels.cpu()].numpy())
    order = torch.empty(len(labels), dtype=torch.int64)
    order[torch.from_numpy(rows)] = torch.from_numpy(columns)
    return labels[order.to(labels.device)]


def labels_of(inputs: Tensor, gradient: Tensor) -> Tensor:
    """Labels `(n,)` of examples whose inputs of the head are known, from any entries of the head's gradient, any scale.

    Row c of the gradient is the mean of (p_ic - y_ic) h_i over examples; only the label's factor is negative.

    Args:
        inputs: of the head, h, `(n, d)`.
        gradient: `(k, d)`, of the mean cross-entropy; zero where it was not observed.
    """
    shares = [
        least_squares(inputs[:, seen].T, row[seen, None])[:, 0]
        for row, seen in zip(gradient, gradient != 0, strict=True)
    ]
    return torch.stack(shares).argmin(dim=0)


@dataclass(frozen=True)
class HeadGradient:
    """Public parameters and released mean gradient of a head with logits W h + b.

    Attributes:
        weight, bias: `(k, d)`, `(k,)`: W and b.
        non_negative: inputs are non-negative, as after a ReLU.
        usual: `(k,)`: mean class probabilities of noise images; before training close to those of any image.
        largest_weight: of an image in the gradient, relative to the mean; above 1 if mini-batches count differently.
        usual_norm: root mean square norm of the inputs for noise images; 0: not known.
    """

    weight: Tensor
    bias: Tensor
    weight_gradient: Tensor
    bias_gradient: Tensor
    n_examples: int
    non_negative: bool
    usual: Tensor
    largest_weight: float = 1.0
    usual_norm: float = 0.0

    @property
    def n_classes(self) -> int:
        """Number of classes `k`."""
        return len(self.weight)

    @property
    def input_norm(self) -> float:
        """Approximate norm of an input: the gradient of the weights is that of the bias times inputs."""
        return float(self.weight_gradient.norm() / self.bias_gradient.norm())

    @property
    def clean(self) -> bool:
        """Whether the gradient has no noise beyond rounding."""
        return _column_noise(self.weight_gradient) < 10 * ROUNDING * self.weight_gradient.abs().max().item()

    @property
    def weight_noise(self) -> float:
        """Standard deviation of the noise on the weights' gradient, whose columns sum to zero without noise."""
        return max(_column_noise(self.weight_gradient), ROUNDING / 3 * self.weight_gradient.abs().max().item())

    @property
    def bias_noise(self) -> float:
        """The same for the bias; a single sum is inaccurate, so noise on the weights is included."""
        rounding = ROUNDING * self.bias_gradient.abs().max().item()
        return max(_column_noise(self.bias_gradient[:, None]), rounding, 0.0 if self.clean else self.weight_noise)


def head_gradient(observation: Observation) -> HeadGradient:
    """The head's part of an observation, in double precision on the CPU; an error without cross-entropy or a bias."""
    require_cross_entropy(observation, "HeadCounts", "reveal the labels and use KnownLabels")
    weight, bias = find_head(observation, "HeadCounts")
    if bias is None:
        raise UnsupportedModelError(
            f"HeadCounts needs the gradient of the head's bias; layer {weight.rpartition('.')[0]!r} has none: "
            "attack one image with IDLG, reveal the labels and use KnownLabels, or optimize them with JointLabels"
        )
    inputs = exact(probe_inputs(observation))
    rule, _ = one_client(observation.operator)
    public = exact(observation.parameters[weight]), exact(observation.parameters[bias])
    gradient = mean_gradient(observation.update, observation)
    return HeadGradient(
        *public,
        exact(gradient[weight]),
        exact(gradient[bias]),
        observation.n_examples,
        non_negative=bool((inputs >= 0).all()),
        usual=torch.softmax(nn.functional.linear(inputs, *public), dim=1).mean(dim=0),
        largest_weight=rule.largest_weight if isinstance(rule, LocalSteps) else 1.0,
        usual_norm=float(inputs.square().sum(dim=1).mean().sqrt()),
    )


def probe_inputs(observation: Observation, batch_norm: BatchNormMode = "eval", together: int = 16) -> Tensor:
    """Inputs `(16, d)` of the head for noise images, half of them coarse, in batches of `together`."""
    weight, _ = find_head(observation, "label recovery")
    generator = torch.Generator().manual_seed(0)
    channels, *sides = observation.image_shape
    fine = torch.rand(8, channels, *sides, generator=generator)
    coarse = torch.rand(8, channels, 3, 3, generator=generator)
    images = torch.cat([fine, nn.functional.interpolate(coarse, size=sides, mode="bilinear")])
    head = weight.rpartition(".")[0]
    return torch.cat([linear_calls(observation, some, batch_norm)[1][head][0][0] for some in images.split(together)])


def exact(tensor: Tensor) -> Tensor:
    """The tensor in double precision on the CPU."""
    return tensor.detach().cpu().double()


def _column_noise(gradient: Tensor) -> float:
    return (gradient.sum(dim=0).square().mean() / len(gradient)).sqrt().item()
