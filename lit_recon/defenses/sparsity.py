"""Sparse updates: coordinates dropped at random, by magnitude, or with their tensor."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from lit_recon.defenses.base import TIED, Defense, Round, checked, positive
from lit_recon.defenses.vectors import entrywise, flatten, unflatten, uniform_like, where_observed
from lit_recon.errors import ConfigError
from lit_recon.noisy_release import NoisyRelease
from lit_recon.records import BatchNormMode, Update

if TYPE_CHECKING:
    from lit_recon.bounds.fisher import Jacobian


class SparseUpdate(Defense, ABC):
    """Sets coordinates of the mean gradient to zero; the attacker applies the mask of the observed update."""

    #: Share of the coordinates, in [0, 1]; 0 changes nothing.
    dropped: float
    #: Notes on the information about the inputs that a bound leaves out.
    left_out: tuple[str, ...] = ("the information in the choice of the dropped coordinates is left out",)

    @abstractmethod
    def transform_update(self, update: Update, round_: Round, generator: torch.Generator) -> Update: ...

    @abstractmethod
    def kept(self, update: Update, round_: Round, generator: torch.Generator) -> Update:
        """Masks of the coordinates that still tell about the inputs, with the random numbers of `transform_update`.

        A coordinate that is exactly 0, such as a weight's at a black pixel, tells about them if its changes pass.
        """

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

    def linearized(
        self, jacobian: Jacobian, round_: Round, generator: torch.Generator
    ) -> tuple[Jacobian, NoisyRelease]:
        kept = self.kept(jacobian.update, round_, generator)
        return jacobian, NoisyRelease(kept=kept, notes=self.left_out)


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

    neutral = (("rate", 0.0),)

    def __init__(self, rate: float = 0.0, rescale: bool = False) -> None:
        self.rate = self.dropped = checked(self, "rate", rate, high=1.0)
        self.rescale = rescale
        if rescale and rate == 1:
            raise ConfigError("GradientDropout drops everything at rate 1 and cannot rescale: set rescale to false")

    def transform_update(self, update: Update, round_: Round, generator: torch.Generator) -> Update:
        if self.rate == 0:
            return update
        kept = self.kept(update, round_, generator)
        return self._scaled({name: torch.where(kept[name], value, 0.0) for name, value in update.items()})

    def kept(self, update: Update, round_: Round, generator: torch.Generator) -> Update:
        return {name: uniform_like(value, generator) >= self.rate for name, value in update.items()}

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

    def linearized(
        self, jacobian: Jacobian, round_: Round, generator: torch.Generator
    ) -> tuple[Jacobian, NoisyRelease]:
        if self.rescale:
            return Defense.linearized(self, jacobian, round_, generator)
        return super().linearized(jacobian, round_, generator)

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

    neutral = (("fraction", 0.0),)

    def __init__(self, fraction: float = 0.0, scope: Literal["global", "tensor"] = "global") -> None:
        if scope not in ("global", "tensor"):
            raise ConfigError(f"GradientPruning needs scope 'global' or 'tensor'; got {scope!r}")
        self.fraction = self.dropped = checked(self, "fraction", fraction, high=1.0)
        self.scope: Literal["global", "tensor"] = scope

    def transform_update(self, update: Update, round_: Round, generator: torch.Generator) -> Update:
        return self._smallest_pruned(update)

    def kept(self, update: Update, round_: Round, generator: torch.Generator) -> Update:
        return self._scoped(self._passing, update)

    def largest_hidden(self, observed: Update) -> dict[str, float]:
        """The smallest magnitude that was kept, of the whole update or of each tensor."""
        if self.fraction == 0:
            return dict.fromkeys(observed, 0.0)
        kept = _smallest_kept(observed)
        return dict.fromkeys(observed, min(kept.values(), default=math.inf)) if self.scope == "global" else kept

    def simulate_share(self, candidate: Update, observed: Update, clients: int) -> Update:
        """The candidate's own pruning, within the union of the clients' masks: exact for the true images."""
        return candidate if self.fraction == 0 else self._smallest_pruned(where_observed(candidate, observed))

    def require_shares(self) -> None:
        return

    def _smallest_pruned(self, update: Update) -> Update:
        return self._scoped(lambda values: values.masked_fill(self._smallest(values), 0.0), update)

    def _scoped(self, change: Callable[[Tensor], Tensor], update: Update) -> Update:
        if self.scope == "global":
            return unflatten(change(flatten(update)), update)
        return {name: change(value) for name, value in update.items()}

    def _smallest(self, values: Tensor) -> Tensor:
        return lowest(values.abs(), round(self.fraction * values.numel()))

    def _passing(self, values: Tensor) -> Tensor:
        # of equal ones, such as zeros, all may pass: any change of the inputs decides anew which are pruned
        sizes = values.abs()
        return sizes >= sizes.masked_fill(self._smallest(values), math.inf).amin()


def _smallest_kept(observed: Update) -> dict[str, float]:
    """Smallest magnitudes by tensor that are not zero; infinite where there are none.

    Those of tensors without dimensions are not taken: some defenses release them unchanged.
    """
    return {
        name: float(torch.where(value == 0, math.inf, value.abs()).min()) if value.numel() and value.dim() else math.inf
        for name, value in observed.items()
    }


class PercentilePrivacy(SparseUpdate):
    """Sets entries of the update below a percentile of all absolute values to zero, and clips the others to `gamma`.

    The percentile is interpolated as by `numpy.percentile`, over all tensors together: of `p` entries, the
    `ceil(percentile / 100 (p - 1))` smallest become zero; fewer if there are ties. The attacker applies the mask of the
    observed update and clips a candidate's entries. No differential privacy.

    NVFlare filters the difference of the weights, divided by the number of local steps. Here the filter acts on an
    update, and `lr` is the difference per step that an entry of 1 stands for, so that `gamma` is NVFlare's number: the
    learning rate for gradients and for local steps released as a gradient, 1 / steps for local steps released as a
    difference (without momentum). The default of 1 leaves `gamma` in units of the update; signs do not matter. Buffers,
    such as BatchNorm's running statistics, count as entries in NVFlare; an update has none. Tensors without dimensions
    count in the percentile but pass unchanged, in NVFlare and here.

    Args:
        percentile: in [0, 100]; NVFlare's default is 10.
        gamma: largest absolute value of an entry as a weight difference per local step, above 0; NVFlare's default is
            0.01. An infinite one clips nothing. NVFlare leaves an update unchanged where it is not positive.
        lr: weight difference per local step that an entry of 1 stands for, above 0.

    Source: NVFlare 2.9, `PercentilePrivacy`, after [Shokri2015].
    """

    left_out = ("the information in which entries were dropped or clipped is left out",)

    neutral = (("percentile", 0.0), ("gamma", math.inf))

    def __init__(self, percentile: float = 0.0, gamma: float = math.inf, lr: float = 1.0) -> None:
        self.percentile = checked(self, "percentile", percentile, high=100.0)
        self.dropped = percentile / 100
        self.gamma, self.lr = positive(self, "gamma", gamma, infinite=True), positive(self, "lr", lr)

    def transform_update(self, update: Update, round_: Round, generator: torch.Generator) -> Update:
        return self._filtered(update)

    def kept(self, update: Update, round_: Round, generator: torch.Generator) -> Update:
        cutoff, censored = self._cutoff(update), self.censored(self._filtered(update))
        return {
            name: ((value.abs() >= cutoff) | (value.dim() == 0)) & ~censored[name] for name, value in update.items()
        }

    def linearized(
        self, jacobian: Jacobian, round_: Round, generator: torch.Generator
    ) -> tuple[Jacobian, NoisyRelease]:
        jacobian, release = super().linearized(jacobian, round_, generator)
        filtered = self._filtered(jacobian.update)
        cut = self.censored(filtered)
        return jacobian, replace(release, constant={name: value * cut[name] for name, value in filtered.items()})

    def simulate(self, candidate: Update, observed: Update) -> Update:
        masked = super().simulate(candidate, observed)
        return entrywise(masked, lambda value: value.clamp(-self.gamma / self.lr, self.gamma / self.lr))

    def simulate_share(self, candidate: Update, observed: Update, clients: int) -> Update:
        """The candidate's own filter, exact for the true images; within the union of masks if nothing is clipped."""
        # clipped entries of several clients may cancel: a zero of the mean does not say that all were dropped
        within = self.percentile > 0 and self.gamma == math.inf
        return self._filtered(where_observed(candidate, observed) if within else candidate)

    def require_shares(self) -> None:
        return

    def censored(self, observed: Update) -> Update:
        limit = self.gamma / self.lr * (1 - TIED)  # means of equal entries and quotients are rounded
        return {name: (value.abs() >= limit) & (value.dim() > 0) for name, value in observed.items()}

    def largest_hidden(self, observed: Update) -> dict[str, float]:
        """The smallest magnitude that was kept; nothing is known where `gamma` may have cut all of a tensor off."""
        kept = _smallest_kept(observed)
        least = min(kept.values(), default=math.inf) if self.percentile else 0.0
        if self.gamma == math.inf:
            return dict.fromkeys(observed, least)
        # two magnitudes: the smaller one was not cut off, whatever scaled the update afterwards
        return {name: least if bool((value.abs() > kept[name]).any()) else math.inf for name, value in observed.items()}

    def _cutoff(self, update: Update) -> Tensor:
        values = flatten(update).abs()
        # every value between two neighbours in the order keeps the same entries as the upper one
        return values.kthvalue(math.ceil((len(values) - 1) * (self.percentile / 100)) + 1).values

    def _filtered(self, update: Update) -> Update:
        if self.percentile:
            cutoff = self._cutoff(update)
            update = entrywise(update, lambda value: torch.where(value.abs() >= cutoff, value, 0.0))
        return entrywise(update, lambda value: value.clamp(-self.gamma / self.lr, self.gamma / self.lr))


class ExcludedVariables(Defense):
    """Some variables (tensors of the update) do not leave the client.

    In NVFlare they are missing from what is sent, and the server leaves its own unchanged; here they are zero, which
    says and does the same, and the attacker, who sees which ones are missing, sets them to zero. A client that keeps
    its own values for the next rounds, as in personalized federated learning, is not modelled: in a training under this
    defense excluded variables stay as they were initialized.

    Args:
        names: of variables in full, or one regular expression that is searched in their names; NVFlare's
            `exclude_vars`. None, an empty list and an empty expression exclude nothing.

    Raises:
        ConfigError: names is neither, or no regular expression; and for a model that lacks one of the names, or all
            that the expression could match, of which NVFlare warns at most.

    Source: NVFlare 2.9, `ExcludeVars`.
    """

    neutral = (("names", None),)

    def __init__(self, names: list[str] | str | None = None) -> None:
        given: object = names  # of any type, from a configuration
        listed = isinstance(given, list) and all(isinstance(one, str) for one in given)
        if not (given is None or isinstance(given, str) or listed):
            raise ConfigError(
                f"ExcludedVariables needs names of variables or one regular expression; got {names!r}: write a list "
                "such as ['head.weight'], or an expression such as '^head'"
            )
        self.names = names
        try:
            self._pattern = re.compile(names) if isinstance(names, str) else None
        except re.error as error:
            raise ConfigError(f"ExcludedVariables needs a regular expression; got {names!r} ({error})") from error

    def prepare(self, model: nn.Module, batch_norm: BatchNormMode = "eval") -> nn.Module:
        known = [name for name, _ in model.named_parameters()]
        missing = [one for one in self.names or () if one not in known] if self._pattern is None else []
        if self._pattern is not None and self.names and not any(map(self.withholds, known)):
            missing = [self._pattern.pattern]
        if missing:
            raise ConfigError(
                f"ExcludedVariables names {missing[0]!r}, but the model's variables are {', '.join(known)}: take names "
                "of these"
            )
        return model

    def transform_update(self, update: Update, round_: Round, generator: torch.Generator) -> Update:
        return self._kept(update)

    def withholds(self, name: str) -> bool:
        if self._pattern is not None:
            return bool(self.names) and self._pattern.search(name) is not None
        return name in (self.names or ())

    def simulate(self, candidate: Update, observed: Update) -> Update:
        return self._kept(candidate)

    def largest_hidden(self, observed: Update) -> dict[str, float]:
        return {name: math.inf if self.withholds(name) else 0.0 for name in observed}

    def require_shares(self) -> None:
        return

    def released_std(self, n_examples: int) -> float:
        return 0.0

    def linearized(
        self, jacobian: Jacobian, round_: Round, generator: torch.Generator
    ) -> tuple[Jacobian, NoisyRelease]:
        update = jacobian.update
        kept = {name: torch.full_like(value, not self.withholds(name)).bool() for name, value in update.items()}
        return jacobian, NoisyRelease(kept=kept)

    def _kept(self, update: Update) -> Update:
        return {name: torch.zeros_like(value) if self.withholds(name) else value for name, value in update.items()}
