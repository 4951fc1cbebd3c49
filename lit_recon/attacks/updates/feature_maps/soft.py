"""Approximate feature maps of convolutions from gradients with noise, and the error to expect of each.

Of the singular directions of a noisy gradient, those with values above the largest of pure noise remain, each weighted
by the squared cosine with the true direction that random matrix theory expects ([BenaychNadakuditi2012]). Under the
weighted projection of all patches, the maps are the leading eigenvectors, as they are of the exact one.

How far a map is from the true one is measured on a second problem: a gradient spanned by the patches of the recovered
maps, as close as possible to the observed one, gets fresh noise of the same size, and the maps recovered from it are
compared with those that it was made of (parametric bootstrap, [EfronTibshirani1993]).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lit_recon.attacks.updates.feature_maps.convolutions import (
    Convolution,
    PatchProjection,
    PatchSpan,
    find_convolutions,
)
from lit_recon.attacks.updates.feature_maps.matching import InputMap, arranged_labels
from lit_recon.attacks.updates.feature_maps.recovery import TOLERANCES, leading_eigenspace, separate, unfit
from lit_recon.attacks.updates.noise import noise_of
from lit_recon.errors import ConfigError, UnsupportedModelError
from lit_recon.records import Observation

#: Applications of the projection per map, see `leading_eigenspace`: rounding errors are far below the noise.
_DEPTH, _ROUNDS = 30, 2
#: Largest expected 1 - cos of a map that is matched: two maps of random images are about this far apart.
_MOST = 0.3
#: Largest share of a separated map's norm below zero.
_NEGATIVE = 0.3


class Signal(NamedTuple):
    """The part of a matrix `(rows, columns)` that stands out of noise.

    Attributes:
        left: `(rows, r)`, orthonormal.
        values: `(r,)`, singular values without the noise, falling.
        right: `(columns, r)`, orthonormal.
        cosines: `(r,)`, expected squared cosines of the columns of `right` with the true ones.
    """

    left: Tensor
    values: Tensor
    right: Tensor
    cosines: Tensor


def signal_in(matrix: Tensor, std: float, rank: int) -> Signal:
    """At most `rank` singular directions of a float64 matrix with independent noise of standard deviation `std`.

    A singular value x becomes y, y^2 = x^2 + m + n + m n / x^2, in an m x n matrix with noise of standard deviation 1,
    if x^4 > m n, and otherwise does not stand out.
    """
    m, n = matrix.shape
    left, found, right = torch.linalg.svd(matrix / std, full_matrices=False)
    middle = found.square() - m - n
    out = (middle > 2 * (m * n) ** 0.5).nonzero().flatten()[:rank]
    squared = (middle[out] + (middle[out].square() - 4 * m * n).sqrt()) / 2
    cosines = (squared.square() - m * n) / (squared * (squared + n))
    return Signal(left[:, out], squared.sqrt() * std, right[out].T.contiguous(), cosines)


@dataclass(frozen=True)
class SoftMaps:
    """Approximate input maps of a convolution.

    Attributes:
        convolution: the layer.
        maps: `(n, c, h, w)` of unit norm, in arbitrary order, not negative; float64.
        error: expected 1 - cos of a map and the true one.
        directions: singular directions that stand out of the noise, of those that all patches span.
    """

    convolution: Convolution
    maps: Tensor
    error: float
    directions: int


def soft_maps(
    convolution: Convolution, gradient: Tensor, std: float, n_examples: int, draws: int = 2, seed: int = 0
) -> SoftMaps | str:
    """The maps, or why there are none.

    Args:
        convolution: suitable for `n_examples`, see `recovery.unfit`.
        gradient: of its weights, float64.
        std: standard deviation of the noise.
        n_examples: batch size.
        draws: of fresh noise for the expected error, at least 1.
        seed: of the draws.
    """
    matrix, rank = gradient.flatten(1), convolution.places * n_examples
    signal = signal_in(matrix, std, rank)
    if len(signal.values) == 0:
        return "no singular value of its gradient stands out of the noise"
    maps = _leading_maps(convolution, signal, n_examples)
    if maps is None:
        return "the maps of the batch cannot be separated"
    generator = torch.Generator().manual_seed(seed)
    clean, errors = _made_of(convolution, maps, matrix, std), []
    for _ in range(draws):
        noise = torch.randn(matrix.shape, generator=generator, dtype=torch.float64)
        again = signal_in(clean + std * noise, std, rank)
        others = None if len(again.values) == 0 else _leading_maps(convolution, again, n_examples)
        # the maps that are furthest apart: orthogonal ones
        errors.append(1.0 if others is None else float((1 - (maps @ others.T).amax(1)).mean()))
    return SoftMaps(convolution, maps.view(-1, *convolution.shape), sum(errors) / draws, len(signal.values))


def _made_of(convolution: Convolution, maps: Tensor, matrix: Tensor, std: float) -> Tensor:
    """The gradient `(rows, columns)` that maps `(n, c h w)` explain of a noisy one, without the noise in that part."""
    shaped = maps.view(-1, *convolution.shape)
    patches = nn.functional.unfold(shaped, convolution.kernel, padding=convolution.padding, stride=convolution.stride)
    basis = torch.linalg.qr(patches.transpose(1, 2).flatten(0, 1).T)[0]
    left, values, right = torch.linalg.svd(matrix @ basis, full_matrices=False)
    # noise adds its variance times the number of rows to every squared singular value
    shrunk = (values.square() - len(matrix) * std**2).clamp_min(0).sqrt()
    return (left * shrunk) @ right @ basis.T


def _leading_maps(convolution: Convolution, signal: Signal, n_examples: int) -> Tensor | None:
    """Non-negative maps `(n, c h w)` of unit norm; None if they cannot be separated."""
    weighted = PatchSpan(signal.right * signal.cosines.sqrt(), math.inf, differences=False)
    projection = PatchProjection(convolution, weighted)
    space = leading_eigenspace(projection, math.prod(convolution.shape), n_examples, _DEPTH, _ROUNDS)
    basis = torch.linalg.qr(projection.maps(space.vectors).flatten(1).T)[0]
    maps: Tensor | None = basis.T
    if n_examples > 1:
        found = (separate(basis, tolerance) for tolerance in TOLERANCES)
        maps = next((one.maps for one in found if one is not None and one.negative < _NEGATIVE), None)
        if maps is None:
            return None
    assert maps is not None
    positive = (maps * maps.sum(1, keepdim=True).sign()).clamp_min(0)  # behind a ReLU
    return nn.functional.normalize(positive, dim=1)


@dataclass(frozen=True)
class SoftPenalty:
    """The penalty of one victim's candidates, with the interface of `features.matching.FeaturePenalty`.

    Attributes:
        observation: of the victim.
        found: maps of several layers, of all examples.
        inputs: of these layers, for candidates.
        weight: of the mean over layers and examples of 1 - cos over its expectation.
        notes: the layers and the expected errors of their maps.
    """

    observation: Observation
    found: tuple[SoftMaps, ...]
    inputs: InputMap
    weight: float
    notes: tuple[str, ...]

    #: The penalty starts with the first iteration.
    start: float = 0.0
    #: Maps of inner layers are not scored as features.
    features: Tensor | None = None

    def penalty(self, images: Tensor, targets: Tensor) -> Tensor:
        """Weighted mean over layers and examples of 1 - cos, in units of its expectation; differentiable."""
        maps = [nn.functional.normalize(part.flatten(1), dim=1) for part in self.inputs.each(images)]
        wanted = targets.split([part.shape[1] for part in maps], dim=1)
        apart = [
            0.5 * (part - goal).square().sum(1).mean() / soft.error
            for part, goal, soft in zip(maps, wanted, self.found, strict=True)
        ]
        return self.weight * torch.stack(apart).mean()

    def targets(self, images: Tensor, labels: Tensor | None) -> Tensor:
        """The maps of all layers `(n, d)`, those of one example in one row: that of the first layer's order."""
        return torch.cat([soft.maps.flatten(1) for soft in self.found], dim=1).to(images)

    def with_labels(self, labels: Tensor) -> SoftPenalty:
        """The same: labels do not matter."""
        return self

    def for_restart(self, number: int) -> SoftPenalty:
        """The same for every restart."""
        return self

    def condition(self, labels: Tensor) -> Tensor:
        """Unsupported, a ConfigError."""
        raise ConfigError("a network can be conditioned on features but not on maps: set conditioned to false")

    def labels(self, images: Tensor, labels: Tensor) -> Tensor:
        """The batch's labels `(n,)` in the order of the reconstructed images."""
        return arranged_labels(self.observation, images, labels)

    def certificate(self, images: Tensor, labels: Tensor) -> tuple[None, bool, tuple[str, ...]]:
        """None: approximate maps certify nothing."""
        return None, False, ()


class SoftMapMatching:
    """Recovers approximate input maps of several convolutions and penalizes images with other maps.

    For updates with noise of known or unknown scale, from which `MapMatching` recovers nothing. Every layer counts by
    the error to expect of its maps. Of a batch, only the layer with the least error is matched: which map of another
    layer belongs to which of it is unknown.

    Args:
        weight: above 0, of the mean of 1 - cos over its expectation: 1 is as far from the recovered maps as the truth.
        draws: of fresh noise for the expectation, see `soft_maps`.
        seed: of the draws.
    """

    def __init__(self, weight: float = 1.0, draws: int = 2, seed: int = 0) -> None:
        if not weight > 0 or draws < 1:
            raise ConfigError(f"SoftMapMatching needs a weight above 0 and at least 1 draw; got {weight:g} and {draws}")
        self.weight, self.draws, self.seed = weight, draws, seed

    def prepare(self, observation: Observation) -> SoftPenalty:
        """Recover a victim's maps.

        Raises:
            UnsupportedModelError: no layer has maps that are better than none; says why for each.
            ThreatModelError: the noise of the defense is neither normal nor Laplace.
        """
        n, (noise, given) = observation.n_examples, noise_of(observation)
        if noise is None:
            raise UnsupportedModelError("the scale of the noise can neither be known nor estimated")
        found: list[SoftMaps] = []
        reasons: list[str] = []
        for layer in find_convolutions(observation):
            reason: SoftMaps | str | None = unfit(layer, n)
            if reason is None:
                gradient = observation.update[f"{layer.name}.weight"].detach().cpu().double()
                reason = soft_maps(layer, gradient, noise.std, n, self.draws, self.seed)
            if isinstance(reason, SoftMaps) and reason.error > _MOST:
                reason = f"expected 1 - cos of its maps {reason.error:.2g}"
            if isinstance(reason, SoftMaps):
                found.append(reason)
            else:
                reasons.append(f"{layer.name}: {reason}")
        how = f"noise of {'known' if given else 'estimated'} standard deviation {noise.std:.3g}"
        if not found:
            raise UnsupportedModelError(f"nothing is left of the maps behind {how} ({'; '.join(reasons)})")
        if n > 1:
            found = [min(found, key=lambda soft: soft.error)]
        each = ", ".join(f"{s.convolution.name} {s.error:.1g} ({s.directions} directions)" for s in found)
        inputs = InputMap(observation, [soft.convolution.name for soft in found], observation.operator.batch_norm)
        note = f"approximate maps behind {how}, with expected 1 - cos: {each}"
        return SoftPenalty(observation, tuple(found), inputs, self.weight, (note,))
