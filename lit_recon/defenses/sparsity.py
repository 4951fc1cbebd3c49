"""Sparse gradients: coordinates dropped at random or by magnitude."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from lit_recon.defenses.base import Defense, Round, checked
from lit_recon.defenses.vectors import flatten, unflatten, uniform_like, where_observed
from lit_recon.errors import ConfigError
from lit_recon.records import Update

if TYPE_CHECKING:
    from lit_recon.bounds.fisher import Jacobian, ReleasedInformation


class SparseUpdate(Defense, ABC):
    """Sets coordinates of the mean gradient to zero; the attacker applies the mask of the observed update."""

    #: Share of the coordinates, in [0, 1]; 0 changes nothing.
    dropped: float
    #: Notes on the information about the inputs that a bound leaves out.
    left_out: tuple[str, ...] = ("the information in the choice of the dropped coordinates is left out",)

    @abstractmethod
    def transform_update(self, update: Update, round_: Round, generator: torch.Generator) -> Update: ...

    @property
    def reads_zeros(self) -> bool:
        """Whether anything is dropped."""
        return self.dropped > 0

    def simulate(self, candidate: Update, observed: Update) -> Update:
        return candidate if self.dropped == 0 else where_observed(candidate, observed)

    def require_shares(self) -> None:
        if self.dropped:
            super().require_shares()

    def released_std(self, n_examples: int) -> float:
        return 0.0

    def released_information(
        self, jacobian: Jacobian, round_: Round, std: float, generator: torch.Generator
    ) -> ReleasedInformation:
        sparse = self.transform_update(jacobian.update, round_, generator)
        return jacobian.released(std, {name: value != 0 for name, value in sparse.items()}, notes=self.left_out)


class GradientDropout(SparseUpdate):
    """Sets every coordinate of the mean gradient to zero with probability `rate`, independently, after averaging.

    One draw of `rand` per tensor.

    Args:
        rate: probability that a coordinate is dropped, in [0, 1].
        rescale: divide the other coordinates by `1 - rate`, which makes the gradient unbiased; not at a rate of 1. The
            attacker then scales the candidate too.

    Source: [Liu2025], section 5 ("randomly dropout the entries of the gradient"), with 0.3 to 0.9.
    """

    left_out = ()

    def __init__(self, rate: float = 0.0, rescale: bool = False) -> None:
        self.rate = self.dropped = checked(self, "rate", rate, high=1.0)
        self.rescale = rescale
        if rescale and rate == 1:
            raise ConfigError("GradientDropout drops everything at rate 1 and cannot rescale: set rescale to false")

    def transform_update(self, update: Update, round_: Round, generator: torch.Generator) -> Update:
        if self.rate == 0:
            return update
        kept = {name: uniform_like(value, generator) >= self.rate for name, value in update.items()}
        return self._scaled({name: torch.where(kept[name], value, 0.0) for name, value in update.items()})

    def simulate(self, candidate: Update, observed: Update) -> Update:
        return self._scaled(super().simulate(candidate, observed))

    def simulate_share(self, candidate: Update, observed: Update, clients: int) -> Update:
        """The expectation over the clients' masks, of which only the union is seen."""
        if self.rate in (0, 1):
            return self.simulate(candidate, observed)
        factor = (1 - self.rate) / (1 - self.rate**clients)
        return self._scaled({name: factor * value for name, value in where_observed(candidate, observed).items()})

    def require_shares(self) -> None:
        return

    def released_information(
        self, jacobian: Jacobian, round_: Round, std: float, generator: torch.Generator
    ) -> ReleasedInformation:
        if self.rescale:
            return Defense.released_information(self, jacobian, round_, std, generator)
        return super().released_information(jacobian, round_, std, generator)

    def _scaled(self, values: Update) -> Update:
        return {name: value / (1 - self.rate) for name, value in values.items()} if self.rescale else values


def lowest(scores: Tensor, count: int) -> Tensor:
    """Mask, of the shape of `scores`, of exactly `count` lowest ones in linear time; ties are broken deterministically.

    >>> lowest(torch.tensor([0.3, 0.1, 0.2]), 2)
    tensor([False,  True,  True])
    """
    flat = scores.reshape(-1)
    few = count <= flat.numel() // 2
    # it is cheaper to select the smaller part
    picked = flat.topk(count if few else flat.numel() - count, largest=not few, sorted=False).indices
    mask = torch.full_like(flat, not few, dtype=torch.bool)
    mask[picked] = few
    return mask.view(scores.shape)


class GradientPruning(SparseUpdate):
    """Sets the smallest coordinates of the mean gradient in absolute value to zero, after averaging.

    Args:
        fraction: in [0, 1]; exactly `round(fraction * p)` of `p` coordinates are pruned.
        scope: of all parameters together (`global`) or of each tensor (`tensor`, weights and biases alike).

    Source: [Zhu2019], section 5.2 and [Liu2025], section 5, with 0.3 to 0.99 and no stated scope; global in the code of
    [Chen2024], per tensor in that of GradAttack.
    """

    def __init__(self, fraction: float = 0.0, scope: Literal["global", "tensor"] = "global") -> None:
        if scope not in ("global", "tensor"):
            raise ConfigError(f"GradientPruning needs scope 'global' or 'tensor'; got {scope!r}")
        self.fraction = self.dropped = checked(self, "fraction", fraction, high=1.0)
        self.scope: Literal["global", "tensor"] = scope

    def transform_update(self, update: Update, round_: Round, generator: torch.Generator) -> Update:
        return self._smallest_pruned(update)

    def simulate_share(self, candidate: Update, observed: Update, clients: int) -> Update:
        """The candidate's own pruning, within the union of the clients' masks: exact for the true images."""
        return candidate if self.fraction == 0 else self._smallest_pruned(where_observed(candidate, observed))

    def require_shares(self) -> None:
        return

    def _smallest_pruned(self, update: Update) -> Update:
        if self.scope == "global":
            return unflatten(self._pruned(flatten(update)), update)
        return {name: self._pruned(value) for name, value in update.items()}

    def _pruned(self, values: Tensor) -> Tensor:
        return values.masked_fill(lowest(values.abs(), round(self.fraction * values.numel())), 0.0)
