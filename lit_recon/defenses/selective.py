"""Selective sharing of an update, as NVFlare's privacy filters do it: the largest entries, chosen ones, some variables.

NVFlare applies its filters to the difference of the weights, divided by the number of local steps. Here they act on the
update of a client. `lr` translates: an entry `g` of the update stands for a difference of `lr g` per step, so that
`gamma` and `tau` are NVFlare's numbers. It is the learning rate for gradients and for local steps released as a
gradient, and 1 / steps for local steps released as a difference (without momentum). The default of 1 leaves both in
units of the update. The sign of a difference does not matter to any of these defenses.

All of NVFlare's buffers, such as BatchNorm's running statistics, count as entries there; an update has none. Entries
of tensors without dimensions count in a percentile or a fraction, but pass unchanged, in NVFlare and here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lit_recon.defenses.base import Defense, Round, checked
from lit_recon.defenses.sparsity import SparseUpdate
from lit_recon.defenses.vectors import flatten, laplace_like, size, unflatten, uniform_like, where_observed
from lit_recon.errors import ConfigError
from lit_recon.records import BatchNormMode, Noise, Update

if TYPE_CHECKING:
    from lit_recon.bounds.fisher import Jacobian, ReleasedInformation


class PercentilePrivacy(SparseUpdate):
    """Sets entries of the update below a percentile of all absolute values to zero, and clips the others to `gamma`.

    The percentile is interpolated as by `numpy.percentile`, over all tensors together: of `p` entries, the
    `ceil(percentile / 100 (p - 1))` smallest become zero; fewer if there are ties. The attacker applies the mask of the
    observed update and clips a candidate's entries. No differential privacy.

    Args:
        percentile: in [0, 100]; NVFlare's default is 10.
        gamma: largest absolute value of an entry as a weight difference per local step, above 0; NVFlare's default is
            0.01. An infinite one clips nothing. NVFlare leaves an update unchanged where it is not positive.
        lr: see the module.

    Source: NVFlare 2.9, `PercentilePrivacy`, after [Shokri2015].
    """

    left_out = ("the information in which entries were dropped or clipped is left out",)

    def __init__(self, percentile: float = 0.0, gamma: float = math.inf, lr: float = 1.0) -> None:
        self.percentile = checked(self, "percentile", percentile, high=100.0)
        self.dropped = percentile / 100
        self.gamma, self.lr = _positive(self, "gamma", gamma, infinite=True), _positive(self, "lr", lr)

    def transform_update(self, update: Update, round_: Round, generator: torch.Generator) -> Update:
        return self._filtered(update)

    def simulate(self, candidate: Update, observed: Update) -> Update:
        masked = super().simulate(candidate, observed)
        return _entries(masked, lambda value: value.clamp(-self.gamma / self.lr, self.gamma / self.lr))

    def simulate_share(self, candidate: Update, observed: Update, clients: int) -> Update:
        """The candidate's own filter, exact for the true images; within the union of masks if nothing is clipped."""
        # clipped entries of several clients may cancel: a zero of the mean does not say that all were dropped
        within = self.percentile > 0 and self.gamma == math.inf
        return self._filtered(where_observed(candidate, observed) if within else candidate)

    def require_shares(self) -> None:
        return

    def censored(self, observed: Update) -> Update:
        limit = self.gamma / self.lr
        return {name: (value.abs() >= limit) & (value.dim() > 0) for name, value in observed.items()}

    def released_information(
        self, jacobian: Jacobian, round_: Round, std: float, generator: torch.Generator
    ) -> ReleasedInformation:
        released = self._filtered(jacobian.update)
        censored = self.censored(released)
        kept = {name: (value != 0) & ~censored[name] for name, value in released.items()}
        return jacobian.released(std, kept, notes=self.left_out)

    def _filtered(self, update: Update) -> Update:
        if self.percentile:
            values = flatten(update).abs()
            # every value between two neighbours in the order keeps the same entries as the upper one
            rank = math.ceil((len(values) - 1) * (self.percentile / 100))
            cutoff = values.kthvalue(rank + 1).values
            update = _entries(update, lambda value: torch.where(value.abs() >= cutoff, value, 0.0))
        return _entries(update, lambda value: value.clamp(-self.gamma / self.lr, self.gamma / self.lr))


class SVTPrivacy(Defense):
    """Shares a fraction of the entries, chosen by the sparse vector technique, clipped and with Laplace noise.

    Of `p` entries `c = ceil(fraction p)` are shared. With weight differences per step `d`, clipped to [-gamma, gamma]:

    - threshold: `T = tau + Lap(gamma / e1)`, with `e1 : e2 = 1 : (2c)^(2/3)` and `e1 + e2 = epsilon`;
    - passes over all entries not yet accepted: each is where `|d| + Lap(2 c gamma / e2) >= T`, until at least `c` are;
    - of those accepted `c` are drawn; they are released as `d + Lap(2 gamma / noise_var)`, all others as zero.

    The number of the pass in which an entry is accepted is geometric: it is drawn directly, so that no threshold is too
    high, where NVFlare goes on forever. Random numbers: the threshold's, one `rand` per tensor for the passes, one call
    for the choice, one `rand` per tensor for the noise, none of them if `fraction` is 0, which releases zeros. There is
    no setting that changes nothing. The attacker clips a candidate's entries and knows the mask and the noise.

    No guarantee of privacy is claimed here: `epsilon` counts `c` accepted entries, the last pass may accept more, and
    tensors without dimensions pass unchanged.

    Args:
        fraction: share of the entries to release, in [0, 1].
        epsilon: budget of the choice, above 0.
        noise_var: budget of the noise on one released entry, above 0; not a variance: larger is less noise. The
            standard deviation is `sqrt(8) gamma / noise_var`. NVFlare's `epsilon_release` is `c noise_var`; its other
            optional divisions of the budget are left out.
        gamma: largest absolute value of an entry as a weight difference per local step, above 0.
        tau: threshold before its noise, a weight difference per local step.
        replace: draw with replacement: fewer than `c` entries are then released.
        lr: see the module.

    Defaults are NVFlare's. Source: NVFlare 2.9, `SVTPrivacy`; selective sharing by the sparse vector technique is of
    [Shokri2015], the technique of [Dwork2014], section 3.6, the division of epsilon of [Lyu2017].
    """

    def __init__(
        self,
        fraction: float = 0.1,
        epsilon: float = 0.1,
        noise_var: float = 0.1,
        gamma: float = 1e-5,
        tau: float = 1e-6,
        replace: bool = True,
        lr: float = 1.0,
    ) -> None:
        self.fraction = checked(self, "fraction", fraction, high=1.0)
        self.epsilon, self.noise_var = _positive(self, "epsilon", epsilon), _positive(self, "noise_var", noise_var)
        self.gamma, self.lr = _positive(self, "gamma", gamma), _positive(self, "lr", lr)
        self.tau, self.replace = checked(self, "tau", tau, low=-math.inf), replace

    def transform_update(self, update: Update, round_: Round, generator: torch.Generator) -> Update:
        shared = self._shared(update, generator) if self.fraction else flatten(update).new_zeros(size(update)).bool()
        limit, released = self.gamma / self.lr, {}
        for name, mask in unflatten(shared, update).items():
            value = update[name]
            if value.dim() == 0:
                released[name] = value
            elif self.fraction:
                noisy = value.clamp(-limit, limit) + self._noise.scale * laplace_like(value, generator)
                released[name] = torch.where(mask, noisy, 0.0)
            else:
                released[name] = torch.zeros_like(value)
        return released

    def simulate(self, candidate: Update, observed: Update) -> Update:
        limit = self.gamma / self.lr
        return _entries(where_observed(candidate, observed), lambda value: value.clamp(-limit, limit))

    def released_std(self, n_examples: int) -> float:
        raise ConfigError(f"no bound is known for {self}: its noise is not Gaussian")

    def released_noise(self, n_examples: int) -> Noise | None:
        return self._noise

    @property
    def reads_zeros(self) -> bool:
        """Always."""
        return True

    @property
    def _noise(self) -> Noise:
        return Noise("laplace", 2 * self.gamma / self.noise_var / self.lr)

    def _shared(self, update: Update, generator: torch.Generator) -> Tensor:
        """Which of all entries `(p,)` are released."""
        count = math.ceil(self.fraction * size(update))
        ratio = (2 * count) ** (2 / 3)
        of_threshold, of_query = self.epsilon / (1 + ratio), self.epsilon * ratio / (1 + ratio)
        exact = {name: self.lr * value.detach().double() for name, value in update.items()}
        zero = flatten(exact).new_zeros(())
        threshold = self.tau + self.gamma / of_threshold * laplace_like(zero, generator)
        passes = []
        for value in exact.values():
            response = value.abs().clamp_max(self.gamma)
            passes.append(_log_waiting(response - threshold, 2 * count * self.gamma / of_query, generator).flatten())
        accepted = _first_passes(torch.cat(passes), count).nonzero().flatten()
        shape = (count,) if self.replace else (len(accepted),)
        order = uniform_like(accepted.new_empty(shape, dtype=torch.float64), generator)
        # uniform numbers are below 1
        drawn = (order * len(accepted)).long() if self.replace else order.argsort()[:count]
        return torch.zeros_like(passes[0].new_empty(size(update)), dtype=torch.bool).index_fill(
            0, accepted[drawn], True
        )


def _log_waiting(excess: Tensor, scale: float, generator: torch.Generator) -> Tensor:
    """Logarithms of times, float64, which rounded up are the first of independent trials `excess + Lap(scale) >= 0`.

    A geometric variable of success probability `q` is an exponential one of rate -log(1 - q), rounded up.
    """
    far = excess.abs() / scale
    # log(-log(1 - q)) with q = 1 - exp(-far) / 2 above the threshold, and exp(-far) / 2 below
    above = (math.log(2) + far).log()
    below = torch.where(far > 30, -math.log(2) - far, (-torch.log1p(-0.5 * (-far).exp())).log())
    exponential = -torch.log1p(-uniform_like(excess, generator))
    return exponential.log() - torch.where(excess >= 0, above, below)


def _first_passes(log_waiting: Tensor, count: int) -> Tensor:
    """Mask of entries accepted in the passes up to the one in which `count` of them are."""
    last = float(log_waiting.kthvalue(count).values)
    # beyond exp(36) whole numbers are all float64 has
    end = last if last > 36 else math.log(max(1, math.ceil(math.exp(last))))
    return log_waiting <= max(last, end)


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
        if self._pattern is not None and self.names and not any(map(self._excluded, known)):
            missing = [self._pattern.pattern]
        if missing:
            raise ConfigError(
                f"ExcludedVariables names {missing[0]!r}, but the model's variables are {', '.join(known)}: take names "
                "of these"
            )
        return model

    def transform_update(self, update: Update, round_: Round, generator: torch.Generator) -> Update:
        return self._kept(update)

    def simulate(self, candidate: Update, observed: Update) -> Update:
        return self._kept(candidate)

    def require_shares(self) -> None:
        return

    def released_std(self, n_examples: int) -> float:
        return 0.0

    def released_information(
        self, jacobian: Jacobian, round_: Round, std: float, generator: torch.Generator
    ) -> ReleasedInformation:
        update = jacobian.update
        return jacobian.released(
            std, {name: torch.full_like(value, not self._excluded(name)).bool() for name, value in update.items()}
        )

    def _kept(self, update: Update) -> Update:
        return {name: torch.zeros_like(value) if self._excluded(name) else value for name, value in update.items()}

    def _excluded(self, name: str) -> bool:
        if self._pattern is not None:
            return bool(self.names) and self._pattern.search(name) is not None
        return name in (self.names or ())


def _entries(update: Update, change: Callable[[Tensor], Tensor]) -> Update:
    """The update with changed tensors, but for those without dimensions."""
    return {name: change(value) if value.dim() else value for name, value in update.items()}


def _positive(owner: object, name: str, value: float, *, infinite: bool = False) -> float:
    """`value`, or a `ConfigError` unless it is above 0; infinity only if `infinite`."""
    if value == 0:
        raise ConfigError(f"{type(owner).__name__} needs a positive {name}; got 0")
    return checked(owner, name, value, infinite=infinite)
