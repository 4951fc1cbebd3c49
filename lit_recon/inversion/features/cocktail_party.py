"""Features as independent components: a gradient's rows mix the inputs of a layer, as microphones mix voices."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_recon.errors import ConfigError, UnsupportedModelError
from lit_recon.inversion.features.layer import LayerGradient
from lit_recon.inversion.features.recovery import FeatureRecovery, RecoveredFeatures
from lit_recon.inversion.features.span import weight_span
from lit_recon.inversion.unmixing import GAUSSIAN_LOG_COSH, negentropy
from lit_recon.records import ForwardOperator


class CocktailParty(FeatureRecovery):
    """Independent component analysis over the `d` entries of the features, by descent on a published objective.

    The whitened row space of the layer's gradient is rotated until its rows are as far from Gaussian as possible:

        - mean_i (mean_d log cosh S_i - c)^2 + decorrelation * mean_ij (exp(sharpness |cos(w_i, w_j)|) - 1)
        + non_negativity * mean_i min(|relu(-S'_i)|, |relu(S'_i)|) + sparsity * mean |S'|

    with unmixing rows w_i of unit norm, S = W X whitened and centered over entries, and S' with the mean added again.
    Assumes independent, non-Gaussian features; knows neither weights nor activation. No certificate, no signs.

    Args:
        decorrelation, sharpness: weight and exponent of the second term.
        non_negativity, sparsity: weights of what is known of features behind a ReLU; 0 for centered features.
        gaussian_reference: c is the value of a Gaussian, so that the first term is a negentropy. The published code has
            c = 0, which favours flat distributions over peaked ones.
        steps, lr: of Adam, from the identity. The published 25,000 steps of 1e-3 go as far as 5,000 of 5e-3.

    Raises:
        ConfigError: a number out of its range.

    Source: Kariyappa et al. 2023, section 4, eq. 8 to 12. In the published code the first term is switched off.
    """

    def __init__(
        self,
        decorrelation: float = 1.47,
        sharpness: float = 12.4,
        non_negativity: float = 0.0,
        sparsity: float = 0.0,
        gaussian_reference: bool = True,
        steps: int = 5_000,
        lr: float = 5e-3,
    ) -> None:
        if min(decorrelation, sharpness, non_negativity, sparsity) < 0 or steps < 1 or lr <= 0:
            raise ConfigError(
                f"CocktailParty needs weights of at least 0, steps >= 1 and lr > 0; "
                f"got decorrelation={decorrelation:g}, "
                f"sharpness={sharpness:g}, non_negativity={non_negativity:g}, sparsity={sparsity:g}, steps={steps}, "
                f"lr={lr:g}"
            )
        self.decorrelation, self.sharpness = decorrelation, sharpness
        self.non_negativity, self.sparsity = non_negativity, sparsity
        self.gaussian_reference, self.steps, self.lr = gaussian_reference, steps, lr

    def run(self, seen: LayerGradient, operator: ForwardOperator | None) -> RecoveredFeatures:
        if not seen.has_weight:
            raise UnsupportedModelError(
                "CocktailParty unmixes the gradient of the feature layer, which is zero everywhere: use MomentRecovery "
                "or ExactRecovery, which can do with the head's"
            )
        basis = weight_span(seen.weight_gradient, seen.n_examples).basis
        rows = basis.T
        mean = rows.mean(dim=1, keepdim=True)
        values, vectors = torch.linalg.eigh(torch.cov(rows).reshape(len(rows), len(rows)))
        whitening = (vectors * values.clamp_min(1e-9).rsqrt()).T
        unmixing = self._unmixed(whitening @ (rows - mean), whitening @ mean)
        return RecoveredFeatures(unmixing @ whitening @ rows, basis, "cocktail_party")

    def objective(self, unmixing: Tensor, whitened: Tensor, mean: Tensor) -> Tensor:
        """The loss of unmixing rows `(n, n)` of unit norm for whitened rows `(n, d)` and their mean `(n, 1)`."""
        sources = unmixing @ whitened
        loss = -negentropy(sources, GAUSSIAN_LOG_COSH if self.gaussian_reference else 0.0).mean()
        off_diagonal = 1 - torch.eye(len(unmixing), dtype=unmixing.dtype)
        alike = torch.expm1(self.sharpness * (unmixing @ unmixing.T).abs()) * off_diagonal
        loss = loss + self.decorrelation * alike.mean()
        shifted = sources + unmixing @ mean
        if self.non_negativity:
            negative, positive = (-shifted).relu().norm(dim=1), shifted.relu().norm(dim=1)
            loss = loss + self.non_negativity * torch.minimum(negative, positive).mean()
        return loss + self.sparsity * shifted.abs().mean() if self.sparsity else loss

    def _unmixed(self, whitened: Tensor, mean: Tensor) -> Tensor:
        free = torch.eye(len(whitened), dtype=whitened.dtype, requires_grad=True)
        optimizer = torch.optim.Adam([free], lr=self.lr)
        with torch.enable_grad():
            for _ in range(self.steps):
                optimizer.zero_grad()
                self.objective(torch.nn.functional.normalize(free, dim=1), whitened, mean).backward()
                optimizer.step()
        return torch.nn.functional.normalize(free.detach(), dim=1)
