"""The gradient of a fully connected layer is a product: the derivatives at its outputs times the inputs it saw.

For a layer z = W x + b and the derivatives D `(n, m)` of the mean loss with respect to z,

    G_W = D^T X        G_b = D^T 1

so whoever knows the inputs X `(n, d)` knows D, and whoever knows D knows X. The attacks on a first layer that sees
the pixels differ in how they come by one of the two.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from lit_recon.clients.batch_norm import pure_copy
from lit_recon.errors import UnsupportedModelError
from lit_recon.records import Observation, Update

#: Relative rounding error of a single-precision gradient.
ROUNDING = 6e-8
#: Relative error of an image that has no part in the gradient.
WITHOUT_PART = 1e6
#: Relative errors below this are all the same: rounding.
PERFECT = 1e-4
#: How often labels and the gradient's scale are found from each other.
FACTOR_ITERATIONS = 4
#: Factor of evidence that decides on a label: beyond any cost of those that are left to be decided.
DECISIVE = 100.0
TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True)
class FirstLayer:
    """A fully connected layer that sees normalized, flattened images.

    Attributes:
        weight_name, bias_name: of its parameters.
        weight, bias: its gradient, `(m, d)` and `(m,)`, in double precision on the CPU.
    """

    weight_name: str
    bias_name: str
    weight: Tensor
    bias: Tensor


def first_layer(observation: Observation) -> FirstLayer:
    """The linear layer whose input is the image itself, and what the update says of it.

    Raises:
        UnsupportedModelError: no such layer, or one without bias.
    """
    found = _layer_on_pixels(observation)
    name = type(observation.model).__name__
    if found is None:
        raise UnsupportedModelError(
            f"this attack reads images off the gradient of a fully connected layer that sees the normalized pixels; "
            f"{name} has none, its pixels pass another layer first: use a trunk that begins with one (MLP), or attack "
            "it with GradientMatching"
        )
    if f"{found}.bias" not in observation.update:
        raise UnsupportedModelError(
            f"this attack needs the gradient of a bias, which tells the scale and the sign of an image; layer "
            f"{found!r} of {name} has none: attack it with GradientMatching"
        )
    weight, bias = (observation.update[f"{found}.{part}"].detach().cpu().double() for part in ("weight", "bias"))
    return FirstLayer(f"{found}.weight", f"{found}.bias", weight, bias)


def _layer_on_pixels(observation: Observation) -> str | None:
    like = next(iter(observation.parameters.values()))
    drawn = torch.rand(2, *observation.image_shape, generator=torch.Generator().manual_seed(0)).to(like)
    mean, std = observation.normalization.tensors(drawn)
    expected = ((drawn - mean) / std).flatten(1)
    model = pure_copy(observation.model, "eval")
    found: list[str] = []

    def compare(name: str, seen: Tensor) -> None:
        if seen.shape == expected.shape and torch.allclose(seen, expected, atol=1e-5):
            found.append(name)

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda _, given, name=name: compare(name, given[0]))
    with torch.no_grad():
        torch.func.functional_call(model, {**observation.parameters, **observation.buffers}, (drawn,))
    return found[0] if found else None


def to_pixels(inputs: Tensor, observation: Observation) -> Tensor:
    """Images `(n, c, h, w)`, in [0, 1] if the inputs are right, of normalized, flattened inputs `(n, d)`."""
    images = inputs.view(-1, *observation.image_shape)
    mean, std = observation.normalization.tensors(images)
    return images * std + mean


def to_inputs(images: Tensor, observation: Observation) -> Tensor:
    """Normalized, flattened inputs `(n, d)` of images `(n, c, h, w)` in [0, 1]."""
    mean, std = observation.normalization.tensors(images)
    return ((images - mean) / std).flatten(1)


def mean_color(n: int, observation: Observation) -> Tensor:
    """`n` images `(c, h, w)` of the data's mean color, returned where an attack finds none."""
    mean = torch.tensor(observation.normalization.mean, dtype=torch.float64)
    return mean[:, None, None].expand(n, *observation.image_shape)


def released(images: Tensor, observation: Observation) -> Tensor:
    """The images in [0, 1], in the precision and on the device of the update."""
    return images.clamp(0, 1).to(next(iter(observation.update.values())))


def derivatives(images: Tensor, labels: Tensor, bias_name: str, observation: Observation) -> Tensor:
    """Derivatives `(n, m)` of every image's own loss with respect to the layer's outputs: its bias gradient alone.

    Exact for one gradient, unless BatchNorm runs on the statistics of the batch, which one image does not give.
    """
    candidates, labels = released(images, observation), labels.to(next(iter(observation.update.values())).device)
    rows = [_update(candidates[i : i + 1], labels[i : i + 1], observation)[bias_name] for i in range(len(candidates))]
    return torch.stack(rows).detach().cpu().double()


def assign_labels(
    images: Tensor,
    labels: Tensor,
    observed: Tensor,
    bias_name: str,
    observation: Observation,
    evidence: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The labels in the order of the images, by how well they explain each image's part in the bias gradient.

    Args:
        images: `(n, c, h, w)`.
        labels: `(l,)`, at least as many as images, in any order.
        observed: `(n, m)`: derivatives of the mean loss with respect to the layer's outputs, image by image.
        bias_name: of the layer.
        observation: for the forward operator.
        evidence: `(n, l)`: costs of label for image from another source, which decide where a row is not zero.

    Returns:
        Labels `(n,)`, and the relative errors `(n,)` that remain; 1e6 for an image without a part.
    """
    classes = labels.unique()
    expected = torch.stack(
        [derivatives(images, label.expand(len(images)), bias_name, observation) for label in classes], dim=1
    )[:, torch.searchsorted(classes, labels).cpu()]
    part = observed.norm(dim=1)
    decided = torch.zeros(len(images), dtype=torch.bool) if evidence is None else evidence.any(dim=1)
    # a clipped gradient is smaller by an unknown factor, the same for all images
    factor = part[part > 0].median() / expected.norm(dim=2).median() if part.any() else torch.tensor(1.0)
    for _ in range(FACTOR_ITERATIONS):
        misfit = (expected * factor - observed[:, None]).norm(dim=2) / part[:, None].clamp(min=TINY)
        misfit = misfit.nan_to_num(WITHOUT_PART).clamp(max=WITHOUT_PART)
        # the logarithm: a bad fit, of which some are bound to be, must not outweigh a perfect one
        cost = log_misfit(misfit)
        if evidence is not None:
            cost = torch.where(decided[:, None], DECISIVE * evidence, cost)
        order, chosen = (torch.as_tensor(found) for found in linear_sum_assignment(cost.numpy()))
        ratios = part / expected[order, chosen].norm(dim=1).clamp(min=TINY)
        factor = ratios[part > 0].median() if part.any() else factor
    return labels[chosen.to(labels.device)], misfit[order, chosen]


def log_misfit(misfit: Tensor) -> Tensor:
    """Cost of relative errors: the logarithm, 0 where nothing is explained, floored where only rounding is left."""
    return (misfit + PERFECT).log().clamp(max=0)


def relative_residual(images: Tensor, labels: Tensor, observation: Observation) -> float:
    """Norm of the candidate's update minus the observed one, over the norm of the latter: what the attacker sees."""
    candidate = _update(released(images, observation), labels, observation)
    squares = [
        ((candidate[name] - value).square().sum(), value.square().sum()) for name, value in observation.update.items()
    ]
    difference, total = (sum(float(pair[i]) for pair in squares) for i in (0, 1))
    return float((difference / total) ** 0.5) if total > 0 else float(difference**0.5)


def _update(images: Tensor, labels: Tensor, observation: Observation) -> Update:
    return observation.operator(observation.parameters, observation.buffers, images, labels)
