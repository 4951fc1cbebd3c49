"""Reconstructors that are perceptrons: of all differences of weights, or of their principal components."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_recon.attacks.released.gaussian_kernel import unit_length
from lit_recon.attacks.released.networks.training import PairTraining, TrainedReconstructor
from lit_recon.errors import ConfigError, ShapeError
from lit_recon.models.reconstructors import ReconstructorMLP

#: Components with less than this share of the first one's variance are rounding errors.
_NULL = 1e-9


@dataclass(frozen=True, eq=False)
class PrincipalComponents:
    """Projection `(p, q)` of differences of unit length, less their mean `(p,)`, onto scaled principal components."""

    mean: Tensor
    projection: Tensor

    @classmethod
    def fitted(cls, differences: Tensor, n: int, seed: int = 0) -> PrincipalComponents:
        """At most `n` components of shadow models `(s, p)`, each of variance 1; ShapeError if all are the same."""
        from sklearn.decomposition import PCA

        directions = unit_length(differences)
        if directions.std(dim=0).max() == 0:
            raise ShapeError("principal components need two or more different models")
        found = PCA(min(n, *directions.shape), svd_solver="auto", random_state=seed).fit(directions.numpy())
        kept = found.explained_variance_ > _NULL * found.explained_variance_[0]
        basis = torch.from_numpy(found.components_[kept] / found.explained_variance_[kept, None] ** 0.5)
        return cls(torch.from_numpy(found.mean_).float(), basis.T.float())

    def __call__(self, differences: Tensor) -> Tensor:
        """Features `(m, q)`, float32; ShapeError for models of another number of weights, zero or not finite."""
        if differences.dim() != 2 or differences.shape[1] != len(self.mean):
            raise ShapeError(
                f"differences must be (m, {len(self.mean)}); got {tuple(differences.shape)}: are they of another "
                "network?"
            )
        return (unit_length(differences) - self.mean) @ self.projection


class ComponentsModule(PairTraining):
    """Training on the mean squared error by AdamW, whose rate falls to 0 along half a cosine."""

    def __init__(self, network: nn.Module, lr: float, weight_decay: float) -> None:
        super().__init__(network, lr)
        self.weight_decay = weight_decay

    def loss(self, found: Tensor, images: Tensor) -> Tensor:
        return F.mse_loss(found, images)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.network.parameters(), self.lr, weight_decay=self.weight_decay)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@dataclass
class ComponentsReconstructor(TrainedReconstructor):
    """A perceptron with GELU on principal components of differences of unit length.

    Args:
        components: of the shadow models' differences.
        hidden: neurons of each hidden layer.
        lr: first learning rate of AdamW.
        weight_decay: of AdamW.
        batch_size, epochs, seed, accelerator: see `TrainedReconstructor`.
    """

    components: int = 500
    hidden: Sequence[int] = (1000, 1000)
    lr: float = 1e-3
    weight_decay: float = 1e-2
    epochs: int = field(default=60, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.hidden or min(*self.hidden, self.components) < 1:
            raise ConfigError(
                f"components and hidden must be at least 1; got {self.components} and {list(self.hidden)}"
            )
        if not self.lr > 0 or self.weight_decay < 0:
            raise ConfigError(f"lr must be above 0 and weight_decay at least 0; got {self.lr} and {self.weight_decay}")

    def encoder(self, differences: Tensor) -> Callable[[Tensor], Tensor]:
        return PrincipalComponents.fitted(differences, self.components, self.seed)

    def training(self, n_features: int, image_shape: tuple[int, int, int]) -> PairTraining:
        network = ReconstructorMLP(n_features, image_shape, self.hidden, "gelu")
        return ComponentsModule(network, self.lr, self.weight_decay)

    @property
    def facts(self) -> dict[str, float]:
        """The `training_loss` of the last epoch, and the number of `components`."""
        return {**super().facts, "components": float(self.n_features)}


class ReconstructorModule(PairTraining):
    """RMSProp, as in [Balle2022], table V, MNIST; its average decays by 0.9 per step, as in the authors' library."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(self.network.parameters(), lr=self.lr, alpha=0.9, eps=1e-8)


@dataclass
class NeuralReconstructor(TrainedReconstructor):
    """The reconstructor of [Balle2022], table V, MNIST: a perceptron on standardized weights.

    Args:
        hidden: neurons of each hidden layer.
        lr: learning rate of RMSProp.
        batch_size, epochs, seed, accelerator: see `TrainedReconstructor`.
    """

    hidden: Sequence[int] = (1000, 1000)
    lr: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.hidden or min(self.hidden) < 1 or not self.lr > 0:
            raise ConfigError(f"hidden must be at least 1 and lr above 0; got {list(self.hidden)} and {self.lr}")

    def training(self, n_features: int, image_shape: tuple[int, int, int]) -> PairTraining:
        return ReconstructorModule(ReconstructorMLP(n_features, image_shape, self.hidden), self.lr)
