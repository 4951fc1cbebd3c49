"""A wide layer of trained and random neurons, from whose gradient its inputs can be computed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lit_recon.errors import ConfigError, ShapeError
from lit_recon.models.layers import Activation, activation_layer

#: Weight of the newest batch in the running center, as in `torch.nn.BatchNorm2d`.
CENTER_MOMENTUM = 0.1
#: Added to the squared norm of a feature vector, so that its direction is smooth at zero.
NORM_EPSILON = 1e-12


class WideFeatureLayer(nn.Module):
    """Neurons `activation(W x + b)` on centered features of unit norm; the first rows are trained, the others frozen.

    A frozen row is drawn from N(0, I) and has bias 0. Its parameters do not require a gradient, so that optimizers
    skip them, but a client's update contains their gradient.

    Features `h` enter as `x = (h - center) / |h - center|`: after a ReLU they lie in a narrow cone, centered they are
    nearly orthogonal, as the reconstruction from the gradient needs them. The center is a buffer; in training mode it
    follows the means of the batches before it is used, as a constant.

    Args:
        in_features: length `d` of a feature vector.
        n_neurons: `m`, trained and random together.
        n_trained: `k`, at most `m`; 4,096 in the paper.
        activation: after the linear map; with GELU the exact reconstruction ends in a smooth least-squares problem.
        seed: of the random rows.

    Source: Liu et al. 2025, appendix F.
    """

    center: Tensor
    n_batches: Tensor

    def __init__(
        self,
        in_features: int,
        n_neurons: int = 8192,
        n_trained: int = 4096,
        activation: Activation = "relu",
        seed: int = 0,
    ) -> None:
        super().__init__()
        if n_neurons < 1 or not 0 <= n_trained <= n_neurons:
            raise ConfigError(
                f"the feature layer needs n_neurons >= 1 and 0 <= n_trained <= n_neurons; "
                f"got n_neurons={n_neurons}, n_trained={n_trained}"
            )
        self.in_features, self.n_neurons, self.n_trained = in_features, n_neurons, n_trained
        self.arguments: dict[str, int | str] = {
            "in_features": in_features,
            "n_neurons": n_neurons,
            "n_trained": n_trained,
            "activation": activation,
            "seed": seed,
        }
        self.trained = nn.Linear(in_features, n_trained) if n_trained else None
        self.random = _frozen_normal(in_features, n_neurons - n_trained, seed) if n_trained < n_neurons else None
        self.activation = activation_layer(activation)
        self.register_buffer("center", torch.zeros(in_features))
        self.register_buffer("n_batches", torch.tensor(0))

    def directions(self, features: Tensor) -> Tensor:
        """Centered features of unit norm, `(n, d)`: the inputs of the neurons."""
        centered = features - self.center
        return centered * torch.rsqrt(centered.square().sum(dim=1, keepdim=True) + NORM_EPSILON)

    def forward(self, features: Tensor) -> Tensor:
        """Neurons `(n, m)`, trained before random, of features `(n, d)`."""
        if self.training:
            self._move_center(features)
        directions = self.directions(features)
        neurons = [part(directions) for part in (self.trained, self.random) if part is not None]
        out: Tensor = self.activation(torch.cat(neurons, dim=1))
        return out

    def set_center(self, features: Tensor) -> None:
        """Center on the mean of features `(n, d)`, a ShapeError for others; a head trained before may lose accuracy."""
        if features.dim() != 2 or features.shape[1] != self.in_features or len(features) == 0:
            raise ShapeError(f"features must be (n, {self.in_features}) with n >= 1; got {tuple(features.shape)}")
        with torch.no_grad():
            self.center.copy_(features.mean(dim=0))

    @torch.no_grad()
    def _move_center(self, features: Tensor) -> None:
        self.n_batches.add_(1)
        # mean of the first batches, later a moving mean: the initial zero has no influence
        momentum = self.n_batches.to(features.dtype).reciprocal().clamp(min=CENTER_MOMENTUM)
        self.center.lerp_(features.mean(dim=0).to(self.center.dtype), momentum)


def _frozen_normal(in_features: int, out_features: int, seed: int) -> nn.Linear:
    generator = torch.Generator().manual_seed(seed)
    # skip_init: does not change the global random state
    layer: nn.Linear = nn.utils.skip_init(nn.Linear, in_features, out_features)
    with torch.no_grad():
        layer.weight.normal_(generator=generator)
        layer.bias.zero_()
    return layer.requires_grad_(False)
