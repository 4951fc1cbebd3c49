"""The directions in which shadow models differ most, as features of unit variance."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lit_recon.errors import ShapeError
from lit_recon.informed.kernel_ridge import unit_length

#: Components whose variance is below this share of the first one's are rounding errors.
_NULL = 1e-9


@dataclass(frozen=True, eq=False)
class PrincipalComponents:
    """Differences of unit length in their principal components, each over its standard deviation.

    Attributes:
        mean: `(p,)`.
        projection: `(p, q)`, onto components over their standard deviations.
    """

    mean: Tensor
    projection: Tensor

    @classmethod
    def fitted(cls, differences: Tensor, n: int, seed: int = 0) -> PrincipalComponents:
        """Of shadow models.

        Args:
            differences: `(s, p)`.
            n: components, or fewer where the models do not have so many.
            seed: of the randomized decomposition that large problems need.

        Raises:
            ShapeError: a difference is zero or not finite, or all are the same.
        """
        from sklearn.decomposition import PCA

        directions = unit_length(differences)
        if directions.std(dim=0).max() == 0:
            raise ShapeError("principal components need two or more different models")
        found = PCA(min(n, *directions.shape), svd_solver="auto", random_state=seed).fit(directions.numpy())
        kept = found.explained_variance_ > _NULL * found.explained_variance_[0]
        basis = torch.from_numpy(found.components_[kept] / found.explained_variance_[kept, None] ** 0.5)
        return cls(torch.from_numpy(found.mean_).float(), basis.T.float())

    def __call__(self, differences: Tensor) -> Tensor:
        """Features `(m, q)`, float32.

        Raises:
            ShapeError: the models have another number of weights, or a difference is zero or not finite.
        """
        if differences.dim() != 2 or differences.shape[1] != len(self.mean):
            raise ShapeError(
                f"differences must be (m, {len(self.mean)}); got {tuple(differences.shape)}: are they of another "
                "network?"
            )
        return (unit_length(differences) - self.mean) @ self.projection
