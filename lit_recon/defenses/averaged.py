"""The attacker's view of a defense behind secure aggregation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from lit_recon.defenses.base import Buffers, Chain, Defense, Round, Stage
from lit_recon.defenses.sparsity import GradientDropout
from lit_recon.errors import ConfigError
from lit_recon.records import Noise, Update

if TYPE_CHECKING:
    from lit_recon.bounds.fisher import Jacobian, ReleasedInformation


class AveragedDefense:
    """A defense that each of several clients applies to its own update, seen through the mean of these updates.

    `simulate` and `simulate_per_example` take one client's candidate; `simulated_gradient` averages. `n_examples` is
    the number of all clients' examples together, and `observed` the mean. Noise in the mean has the standard deviation
    of one client's divided by the root of their number. A coordinate of the mean is zero only where every client has
    dropped it: each client's pruning is repeated on its candidates, and dropout is replaced by its expectation.

    Raises:
        ConfigError: the attacker cannot simulate the defense from the mean, as with `OptimalGradientPruning`, whose
            masks depend on random directions of every client.
    """

    def __init__(self, defense: Defense, clients: int) -> None:
        defense.require_shares()
        self.defense, self.clients = defense, clients

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.defense}, clients={self.clients})"

    @property
    def stages(self) -> Sequence[Stage]:
        return self.defense.stages

    def simulate_buffers(self, buffers: Buffers, observed: Update, n_examples: int) -> Buffers:
        return self.defense.simulate_buffers(buffers, observed, n_examples)

    def simulate_per_example(self, gradients: Update) -> Update:
        return self.defense.simulate_per_example(gradients)

    def simulate(self, candidate: Update, observed: Update) -> Update:
        return self.defense.simulate_share(candidate, observed, self.clients)

    def censored(self, observed: Update) -> Update:
        """Entries that all clients have cut off; those that only some have are not seen in the mean."""
        return self.defense.censored(observed)

    def largest_hidden(self, observed: Update) -> dict[str, float]:
        """Infinite: the mean does not show what each client kept."""
        return dict.fromkeys(observed, math.inf)

    def released_std(self, n_examples: int) -> float:
        """Standard deviation of the noise on every coordinate of the mean; errors as for `Defense.released_std`.

        Also a `ConfigError` for random masks: what `simulate` computes is then not the mean of the release.
        """
        if _has_random_masks(self.defense):
            raise ConfigError(
                f"no bound is known for {self.defense} of several clients: only the union of masks is seen"
            )
        return self.defense.released_std(n_examples // self.clients) / math.sqrt(self.clients)

    def released_noise(self, n_examples: int) -> Noise | None:
        """The noise in the mean; a `ConfigError` where it is not normal, or one client's release has no density."""
        if self.defense.released_noise(n_examples // self.clients) is None:
            return None
        return Noise("gaussian", self.released_std(n_examples))

    def released_information(
        self, jacobian: Jacobian, round_: Round, std: float, generator: torch.Generator
    ) -> ReleasedInformation:
        """As `Defense.released_information`, for the mean; only where noise is all that clients do to an update."""
        if self.defense.without_noise().stages:
            raise ConfigError(f"no bound is known for the mean of {self.clients} updates with {self.defense} each")
        return jacobian.released(self.released_std(len(round_.batch.images)) or std)


def seen_in_mean(defense: Defense, clients: int) -> Defense | AveragedDefense:
    """The defense as the attacker of the mean of `clients` clients' updates simulates it; errors as above."""
    return defense if clients == 1 else AveragedDefense(defense, clients)


def _has_random_masks(defense: Defense) -> bool:
    if isinstance(defense, Chain):
        return any(_has_random_masks(part) for part in defense.defenses)
    return isinstance(defense, GradientDropout) and 0 < defense.rate < 1
