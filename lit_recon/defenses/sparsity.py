"""Sparse gradients: coordinates dropped at random or by magnitude."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from lit_recon.defenses.base import Defense, Round, checked
from lit_recon.defenses.vectors import flatten, unflatten, uniform_like, where_observed
from lit_recon.errors import ConfigError
from lit_recon.records import Update

if TYPE_CHECKING:
    from lit_recon.bounds.fisher import Jacobian, ReleasedInformation


class GradientDropout(Defense):
    """Sets every coordinate of the mean gradient to zero with probability `rate`, independently, after averaging.

    The other coordinates are unchanged, unless `rescale` divides them by `1 - rate`, which makes the gradient unbiased.
    One draw of `rand` per tensor. A rate of 0 changes nothing.

    The attacker applies the mask of the observed update, and the factor, to the candidate.

    Args:
        rate: probability that a coordinate is dropped, in [0, 1].
        rescale: divide by `1 - rate`.

    Raises:
        ConfigError: a rate outside its range, or `rescale` at a rate of 1.

    Source: [Liu2025], section 5 ("randomly dropout the entries of the gradient"), with 0.3 to 0.9.
    """

    def __init__(self, rate: float = 0.0, rescale: bool = False) -> None:
        self.rate, self.rescale = checked(self, "rate", rate, high=1.0), rescale
        if rescale and rate == 1:
            raise ConfigError("GradientDropout drops everything at rate 1 and cannot rescale: set rescale to false")

    def transform_update(self, update: Update, round_: Round, generator: torch.Generator) -> Update:
        if self.rate == 0:
            return update
        kept = {name: uniform_like(value, generator) >= self.rate for name, value in update.items()}
        return self._scaled({name: torch.where(kept[name], value, 0.0) for name, value in update.items()})

    def simulate(self, candidate: Update, observed: Update) -> Update:
        return candidate if self.rate == 0 else self._scaled(where_observed(candidate, observed))

    def released_std(self, n_examples: int) -> float:
        return 0.0

    def released_information(
        self, jacobian: Jacobian, round_: Round, std: float, generator: torch.Generator
    ) -> ReleasedInformation:
        if self.rescale:
            return super().released_information(jacobian, round_, std, generator)
        return masked_information(self, jacobian, round_, std, generator)

    def _scaled(self, values: Update) -> Update:
        return {name: value / (1 - self.rate) for name, value in values.items()} if self.rescale else values


def masked_information(
    defense: Defense, jacobian: Jacobian, round_: Round, std: float, generator: torch.Generator, *notes: str
) -> ReleasedInformation:
    """`released_information` of a defense that sets coordinates to zero and leaves the others unchanged."""
    sparse = defense.transform_update(jacobian.update, round_, generator)
    kept = {name: value != 0 for name, value in sparse.items()}
    return jacobian.released(std, kept, notes=notes)


#: Note on the information in an update whose dropped coordinates depend on the inputs.
CHOICE_LEFT_OUT = "the information in the choice of the dropped coordinates is left out"


def lowest(scores: Tensor, count: int) -> Tensor:
    """Boolean mask, of the shape of `scores`, of exactly `count` coordinates with the lowest scores.

    By selection: linear time, and no limit on the number of coordinates, while `torch.quantile`
    allows 16 million. The choice among equal scores is arbitrary but deterministic.

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


class GradientPruning(Defense):
    """Sets the smallest coordinates of the mean gradient in absolute value to zero, after averaging.

    Exactly `round(fraction * p)` of the `p` coordinates are pruned, of all parameters together (`global`) or of each
    tensor (`tensor`, weights and biases alike). No random numbers. A fraction of 0 changes nothing.

    The attacker applies the mask of the observed update to the candidate.

    Args:
        fraction: in [0, 1].
        scope: prune this fraction of all coordinates (`global`) or of each tensor (`tensor`).

    Raises:
        ConfigError: a setting outside its range.

    Source: [Zhu2019], section 5.2 and [Liu2025], section 5, with 0.3 to 0.99 and no stated scope; global in
        the code of [Chen2024], per tensor in that of GradAttack.
    """

    def __init__(self, fraction: float = 0.0, scope: Literal["global", "tensor"] = "global") -> None:
        if scope not in ("global", "tensor"):
            raise ConfigError(f"GradientPruning needs scope 'global' or 'tensor'; got {scope!r}")
        self.fraction = checked(self, "fraction", fraction, high=1.0)
        self.scope: Literal["global", "tensor"] = scope

    def transform_update(self, update: Update, round_: Round, generator: torch.Generator) -> Update:
        if self.scope == "global":
            return unflatten(self._pruned(flatten(update)), update)
        return {name: self._pruned(value) for name, value in update.items()}

    def simulate(self, candidate: Update, observed: Update) -> Update:
        return candidate if self.fraction == 0 else where_observed(candidate, observed)

    def released_std(self, n_examples: int) -> float:
        return 0.0

    def released_information(
        self, jacobian: Jacobian, round_: Round, std: float, generator: torch.Generator
    ) -> ReleasedInformation:
        return masked_information(self, jacobian, round_, std, generator, CHOICE_LEFT_OUT)

    def _pruned(self, values: Tensor) -> Tensor:
        return values.masked_fill(lowest(values.abs(), round(self.fraction * values.numel())), 0.0)
