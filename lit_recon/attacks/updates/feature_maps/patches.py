"""The likelihood of convolutions' noisy gradients given only the inputs of the convolutions in candidate images.

The gradient of a convolution's weights, `(channels, c k k)`, is D^T P plus noise, with one row per place of every image
in P, the patch under the kernel, and in D, the derivative of the loss in the output there. With the most likely D, that
of least squares, the squared share of the gradient's rows outside the span of the patches is left (variable projection,
[GolubPereyra1973]). That needs neither labels nor a backward pass through the loss, holds for any loss, for clipped
gradients and for any number of examples, and is continuous in the images where the gradient itself jumps with every
ReLU that switches. There is something outside as long as there are fewer patches than channels and entries of a patch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lit_recon.attacks.updates.feature_maps.convolutions import Convolution, find_convolutions, hidden_entries
from lit_recon.attacks.updates.feature_maps.input_map import InputMap
from lit_recon.attacks.updates.feature_maps.matching import arranged_labels
from lit_recon.attacks.updates.noise import edge, noise_of, singular_values
from lit_recon.errors import ConfigError, UnsupportedModelError
from lit_recon.records import Noise, Observation

#: Added to the patches' Gram matrix, relative to the mean of its diagonal, against patches that are all zero.
_RIDGE = 1e-9
#: Standard deviations of the misfit up to which images explain the gradients.
_EXPLAINED = 4.0
#: Share of zeros in a gradient from which they count as hidden entries; exact gradients of first layers have a few.
_HIDDEN = 0.1


@dataclass(frozen=True)
class PatchPenalty:
    """The penalty of one victim's candidates, with the interface of `features.matching.FeaturePenalty`.

    Attributes:
        observation: of the victim.
        layers: the convolutions.
        noise: in their gradients; treated as normal.
        inputs: of the layers, for candidates.
        weight: of minus the log-likelihood, in nats per pixel of the batch.
        notes: the noise, and what stands out of it.
    """

    observation: Observation
    layers: tuple[Convolution, ...]
    noise: Noise
    inputs: InputMap
    weight: float
    notes: tuple[str, ...]

    #: The penalty starts with the first iteration.
    start: float = 0.0
    #: Inputs of convolutions are not scored as features.
    features: Tensor | None = None

    @cached_property
    def gradients(self) -> list[Tensor]:
        """Of the layers, each `(channels, c k k)`, in units of the noise; float64."""
        return [_gradient(self.observation, layer) / self.noise.std for layer in self.layers]

    @property
    def pixels(self) -> int:
        """Number of pixels of the batch."""
        return self.observation.n_examples * math.prod(self.observation.image_shape)

    @property
    def freedom(self) -> int:
        """Expected misfit of the true images, and half its variance: coordinates less entries of all D."""
        patches = [layer.places * self.observation.n_examples for layer in self.layers]
        return sum(g.shape[0] * (g.shape[1] - r) for g, r in zip(self.gradients, patches, strict=True))

    def misfit(self, images: Tensor) -> Tensor:
        """Sum of the squares of what lies outside the span of the images' patches, in units of the noise; float64."""
        outside = []
        for layer, gradient, maps in zip(self.layers, self.gradients, self.inputs.each(images), strict=True):
            patches = layer.patches(maps).transpose(1, 2).flatten(0, 1).double()
            gram = patches @ patches.T
            size = gram.diagonal().mean().detach().clamp_min(torch.finfo(torch.float64).tiny)
            factor = torch.linalg.cholesky(gram + _RIDGE * size * torch.eye(len(gram)).to(gram))
            inside = torch.linalg.solve_triangular(factor, patches @ gradient.T, upper=False)
            outside.append(gradient.square().sum() - inside.square().sum())
        return torch.stack(outside).sum()

    def penalty(self, images: Tensor, targets: Tensor) -> Tensor:
        """Weighted minus log-likelihood per pixel, less its expectation at the true images; differentiable."""
        return (self.weight * 0.5 * (self.misfit(images) - self.freedom) / self.pixels).to(images.dtype)

    def with_labels(self, labels: Tensor) -> PatchPenalty:
        """The same: labels do not matter."""
        return self

    def for_restart(self, number: int) -> PatchPenalty:
        """The same for every restart."""
        return self

    def targets(self, images: Tensor, labels: Tensor | None) -> Tensor:
        """Nothing: the gradients are fixed."""
        return images.new_zeros(())

    def condition(self, labels: Tensor) -> Tensor:
        """Unsupported, a ConfigError."""
        raise ConfigError("a network can be conditioned on features but not on patches: set conditioned to false")

    def labels(self, images: Tensor, labels: Tensor) -> Tensor:
        """The batch's labels `(n,)` in the order of the reconstructed images."""
        return arranged_labels(self.observation, images, labels)

    def certificate(self, images: Tensor, labels: Tensor) -> tuple[None, bool, tuple[str, ...]]:
        """No certificate of single images; a note on whether they explain the gradients up to the noise."""
        with torch.no_grad():
            excess = (float(self.misfit(images)) - self.freedom) / (2 * self.freedom) ** 0.5
        does = "is that of the noise"
        if excess > _EXPLAINED:
            does = "is more than noise: the search ended too early or in a local minimum"
        return None, False, (f"misfit of the images' patches {does}: {excess:.2g} standard deviations above its mean",)


class PatchMatching:
    """Matches the patches of candidates to the gradients of all convolutions with fewer patches than channels.

    The gradients may have normal noise of known or unknown scale, for which the likelihood is that of `PatchPenalty`;
    with Laplace noise it is least squares. With `FeaturesOnly` as objective no update is computed at all, and an
    iteration is one forward and one backward pass up to the last of these convolutions.

    Args:
        layers: names of the convolutions; default: all with fewer patches in the batch than channels.
        weight: above 0, of minus the log-likelihood in nats per pixel of the batch.
    """

    def __init__(self, layers: list[str] | None = None, weight: float = 1.0) -> None:
        if (layers is not None and not layers) or not weight > 0:
            raise ConfigError(
                f"PatchMatching needs a weight above 0 and at least one layer, or null for all; got {weight:g}"
            )
        self.layers, self.weight = layers, weight

    def prepare(self, observation: Observation) -> PatchPenalty:
        """Choose the convolutions and find the noise.

        Raises:
            UnsupportedModelError: no convolution has few enough patches; entries of their gradients are hidden; or no
                singular value of these is larger than those of noise.
            ConfigError: a layer is not a plain convolution of the model, or has too many patches.
            ThreatModelError: the noise of the defense is neither normal nor Laplace.
        """
        n = observation.n_examples
        fit = {layer.name: layer for layer in find_convolutions(observation) if _outside(layer, n) > 0}
        for name in self.layers or ():
            if name not in fit:
                raise ConfigError(
                    f"{name!r} is no plain convolution with fewer patches than channels: {', '.join(fit)}"
                )
        if not fit:
            raise UnsupportedModelError(
                f"no convolution has fewer patches in a batch of {n} than channels: attack smaller batches, or match "
                "gradients instead"
            )
        layers = tuple(fit[name] for name in self.layers or fit)
        hidden = [
            layer.name for layer in layers if hidden_entries(_gradient(observation, layer)).double().mean() > _HIDDEN
        ]
        if hidden:
            raise UnsupportedModelError(f"entries of the gradients are hidden: {', '.join(hidden)}; see MapMatching")
        noise, given = noise_of(observation)
        if noise is None:
            raise UnsupportedModelError(f"the noise cannot be estimated from {', '.join(fit)}: they are too small")
        above = [_above(_gradient(observation, layer), layer.places * n, noise.std) for layer in layers]
        how = f"{'known' if given else 'estimated'} standard deviation {noise.std:.3g}"
        if not any(above):
            raise UnsupportedModelError(
                f"nothing is left of the maps: no convolution's gradient has singular values above noise of {how}"
            )
        counts = ", ".join(f"{one.name} {count} of {one.places * n}" for one, count in zip(layers, above, strict=True))
        note = f"patches of {len(layers)} convolutions matched; singular values above noise of {how}: {counts}"
        inputs = InputMap(observation, [layer.name for layer in layers], observation.operator.batch_norm)
        return PatchPenalty(observation, layers, noise, inputs, self.weight, (note,))


def _gradient(observation: Observation, layer: Convolution) -> Tensor:
    return observation.update[f"{layer.name}.weight"].detach().double().flatten(1)


def _outside(layer: Convolution, n_examples: int) -> int:
    """Dimensions of the rows and columns of a layer's gradient outside the span of all patches, the fewer of both."""
    return min(layer.channels, layer.patch_size) - layer.places * n_examples


def _above(gradient: Tensor, rank: int, std: float) -> int:
    """Number of singular values, at most `rank`, above the largest of noise, with a margin of 5 %."""
    found = singular_values(gradient.cpu()) > 1.05 * std * edge(*gradient.shape)
    return min(rank, int(found.sum()))
