"""Features as independent components: the rows of a layer's gradient are mixtures of its inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_recon.attacks.updates.features.layer import FeatureRecovery, LayerGradient, RecoveredFeatures
from lit_recon.attacks.updates.linear_layer.unmixing import (
    GAUSSIAN_LOG_COSH,
    decorrelation,
    mixtures_of,
    negentropy,
    non_negativity,
)
from lit_recon.errors import ConfigError, UnsupportedModelError
from lit_recon.records import ForwardOperator
from lit_recon.solving import least_squares


class CocktailParty(FeatureRecovery):
    """Independent component analysis over the `d` entries of the features, by descent on a published objective.

    The whitened row space of the layer's gradient is unmixed by minimizing::

        - negentropy * mean_i (mean_d log cosh S_i - c)^2 + decorrelation * mean_ij (exp(sharpness |cos(w_i, w_j)|) - 1)
        + non_negativity * mean_i min(|relu(-S'_i)|, |relu(S'_i)|) + sparsity * mean |S'|

    with unmixing rows w_i of unit norm, S = W X whitened and centered over entries, and S' with the mean added again.
    Assumes independent, non-Gaussian features; uses neither weights nor activation. Signs follow from the gradient of
    the layer's bias, the same mixture of ones, and labels from the head's gradient. Where the layer centers features
    and `non_negativity` counts, the public center joins the mixtures, so that sources are features before centering,
    which are sparse and not negative behind a ReLU; of the `n + 1` sources the least sparse one is no feature.

    Args:
        decorrelation, sharpness: weight and exponent of the second term.
        non_negativity, sparsity: weights of terms for features after a ReLU; 0 behind other activations.
        negentropy: weight of the first term; 0 in the published code.
        gaussian_reference: c is the value of a Gaussian, and the first term a negentropy. The published code has
            c = 0, which favors flat distributions over peaked ones.
        steps, lr: of Adam, from the identity. The published 25,000 steps of 1e-3 are equivalent to 5,000 of 5e-3.

    Source: [Kariyappa2023] and its code, in which the first term is switched off; signs and labels are ours.
    """

    def __init__(
        self,
        decorrelation: float = 1.47,
        sharpness: float = 12.4,
        non_negativity: float = 0.0,
        sparsity: float = 0.0,
        negentropy: float = 1.0,
        gaussian_reference: bool = True,
        steps: int = 5_000,
        lr: float = 5e-3,
    ) -> None:
        if min(decorrelation, sharpness, non_negativity, sparsity, negentropy) < 0 or steps < 1 or lr <= 0:
            raise ConfigError(
                f"CocktailParty needs weights of at least 0, steps >= 1 and lr > 0; got decorrelation="
                f"{decorrelation:g}, sharpness={sharpness:g}, non_negativity={non_negativity:g}, "
                f"sparsity={sparsity:g}, negentropy={negentropy:g}, steps={steps}, lr={lr:g}"
            )
        self.decorrelation, self.sharpness = decorrelation, sharpness
        self.non_negativity, self.sparsity = non_negativity, sparsity
        self.negentropy, self.gaussian_reference = negentropy, gaussian_reference
        self.steps, self.lr = steps, lr

    def run(self, seen: LayerGradient, operator: ForwardOperator | None) -> RecoveredFeatures:
        if not seen.has_weight:
            raise UnsupportedModelError(
                "CocktailParty unmixes the gradient of the feature layer, which is zero everywhere: use MomentRecovery "
                "or ExactRecovery, which can use the head's"
            )
        mixed = mixtures_of(seen.weight_gradient, None, seen.n_examples).basis
        span = torch.linalg.qr(mixed.T).Q
        center = seen.center if len(mixed) > 1 and self.non_negativity else None
        found = self._sources(mixed) if center is None else self._before_centering(span, seen.weight_gradient, center)
        features = torch.nn.functional.normalize(found, dim=1)
        if not seen.bias_gradient.any():
            return RecoveredFeatures(features, span, "cocktail_party", signed=center is not None)
        features = features * signs_told(features, seen)[:, None]
        labels = labels_told(features, seen) if seen.has_head else None
        return RecoveredFeatures(features, span, "cocktail_party", signed=True, labels=labels)

    def objective(self, unmixing: Tensor, whitened: Tensor, mean: Tensor) -> Tensor:
        """The loss of unmixing rows `(n, n)` of unit norm for whitened rows `(n, d)` and their mean `(n, 1)`."""
        sources = unmixing @ whitened
        loss = -self.negentropy * negentropy(sources, GAUSSIAN_LOG_COSH if self.gaussian_reference else 0.0).mean()
        loss = loss + self.decorrelation * decorrelation(unmixing @ unmixing.T, self.sharpness)
        shifted = sources + unmixing @ mean
        if self.non_negativity:
            loss = loss + self.non_negativity * non_negativity(shifted)
        return loss + self.sparsity * shifted.abs().mean() if self.sparsity else loss

    def _sources(self, basis: Tensor) -> Tensor:
        """As many sources `(j, d)` as there are whitened mixtures `(j, d)`."""
        mean = basis.mean(dim=1, keepdim=True)
        return self._unmixed(basis - mean, mean) @ basis

    def _before_centering(self, span: Tensor, gradient: Tensor, center: Tensor) -> Tensor:
        """Centered features `(n, d)` from sources of the gradient's span `(d, n)` and the center `(d,)` together."""
        direction = torch.nn.functional.normalize(center, dim=0)
        within = torch.linalg.qr(gradient @ span).R @ span.T
        rows = torch.cat([within, within.norm() * direction[None]])
        sources = torch.nn.functional.normalize(self._sources(mixtures_of(rows, None, span.shape[1] + 1).basis))
        # the weakest mixtures may fall below rounding beside the center
        sparsest = sources.abs().mean(dim=1).topk(min(span.shape[1], len(sources)), largest=False).indices
        parts = least_squares(torch.cat([span, direction[:, None]], dim=1), sources[sparsest].T)
        return (parts[:-1] * parts[-1].sign()).T @ span.T

    def _unmixed(self, whitened: Tensor, mean: Tensor) -> Tensor:
        free = torch.eye(len(whitened), dtype=whitened.dtype, requires_grad=True)
        optimizer = torch.optim.Adam([free], lr=self.lr)
        with torch.enable_grad():
            for _ in range(self.steps):
                optimizer.zero_grad()
                self.objective(torch.nn.functional.normalize(free, dim=1), whitened, mean).backward()
                optimizer.step()
        return torch.nn.functional.normalize(free.detach(), dim=1)


def signs_told(features: Tensor, seen: LayerGradient) -> Tensor:
    """1 or -1 for each feature `(n, d)`, such that the implied derivatives sum to the bias's gradient."""
    parts = least_squares(features.T, seen.weight_gradient.T)
    ones = least_squares(parts.T, seen.bias_gradient[:, None])[:, 0]
    return torch.where(ones < 0, -1.0, 1.0).to(features)


def labels_told(features: Tensor, seen: LayerGradient) -> Tensor:
    """The class `(n,)` of each feature: the loss decreases in the logit of an example's own class."""
    neurons = seen.activation.value(features @ seen.weight.T + seen.bias)
    deltas: Tensor = least_squares(neurons.T, seen.head_gradient.T)
    return deltas.argmin(dim=1)
