"""Defenses made of others: chains, and the attacker's view of a defense behind secure aggregation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from lit_recon.defenses.base import TIED, Buffers, Defense, Round, Stage
from lit_recon.defenses.clipping import GradientClipping, clipped_like
from lit_recon.defenses.sparsity import ExcludedVariables, GradientDropout, PercentilePrivacy, SparseUpdate
from lit_recon.errors import ConfigError
from lit_recon.noisy_release import NoisyRelease
from lit_recon.records import Batch, BatchNormMode, Noise, Update

if TYPE_CHECKING:
    from lit_recon.bounds.fisher import Jacobian, ReleasedInformation


class Chain(Defense):
    """Applies defenses in the listed order; an empty chain changes nothing.

    The order must be that of the stages: batch, per-example gradients, update; else it is a `ConfigError`. The attacker
    simulates each with the released update of the whole chain: noise after pruning hides the mask. Of a mask, clipping
    and another mask, only both masks together are seen, and not the norm that was clipped: a candidate's update is
    then scaled to at most the released norm, which is right for the true images.
    """

    neutral: ClassVar[tuple[tuple[str, object], ...]] = (("defenses", []),)

    def __init__(self, defenses: Sequence[Defense] = ()) -> None:
        self.defenses = list(defenses)
        acting = [defense for defense in self.defenses if defense.stages]
        for first, second in pairwise(acting):
            if max(first.stages) > min(second.stages):
                raise ConfigError(
                    f"a Chain must list its defenses in the order batch, per_example, update: {second} changes the "
                    f"{min(second.stages).name.lower()} and cannot follow {first}, which changes the "
                    f"{max(first.stages).name.lower()}: {_remedy(acting)}"
                )

    @property
    def stages(self) -> tuple[Stage, ...]:
        """All stages of the chained defenses, in order of execution."""
        return tuple(sorted({stage for defense in self.defenses for stage in defense.stages}))

    def prepare(self, model: nn.Module, batch_norm: BatchNormMode = "eval") -> nn.Module:
        for defense in self.defenses:
            model = defense.prepare(model, batch_norm)
        return model

    def transform_batch(self, batch: Batch, model: nn.Module, generator: torch.Generator) -> Batch:
        for defense in self.defenses:
            batch = defense.transform_batch(batch, model, generator)
        return batch

    def transform_per_example(self, gradients: Update, generator: torch.Generator) -> Update:
        for defense in self.defenses:
            gradients = defense.transform_per_example(gradients, generator)
        return gradients

    def transform_update(self, update: Update, round_: Round, generator: torch.Generator) -> Update:
        for defense in self.defenses:
            update = defense.transform_update(update, round_, generator)
        return update

    def withholds(self, name: str) -> bool:
        """Whether any of the chained defenses does: what the others add to zeros in its place is not sent either."""
        return any(defense.withholds(name) for defense in self.defenses)

    def simulate_buffers(self, buffers: Buffers, observed: Update, n_examples: int) -> Buffers:
        for defense in self.defenses:
            buffers = defense.simulate_buffers(buffers, observed, n_examples)
        return buffers

    def simulate_per_example(self, gradients: Update) -> Update:
        for defense in self.defenses:
            gradients = defense.simulate_per_example(gradients)
        return gradients

    def simulate(self, candidate: Update, observed: Update) -> Update:
        late = [self._clips_between_masks(number) for number in range(len(self.defenses))]
        for defense, skipped in zip(self.defenses, late, strict=True):
            candidate = candidate if skipped else defense.simulate(candidate, observed)
        return clipped_like(candidate, observed) if any(late) else candidate

    def _clips_between_masks(self, number: int) -> bool:
        """Whether this defense clips an update with masks before and after it, and only masks and clipping follow."""
        after = [defense for defense in self.defenses[number + 1 :] if defense.stages]
        return (
            isinstance(self.defenses[number], GradientClipping)
            and any(defense.reads_zeros for defense in self.defenses[:number])
            and any(not isinstance(defense, GradientClipping) for defense in after)
            and all(isinstance(defense, GradientClipping) or _only_masks(defense) for defense in after)
        )

    def censored(self, observed: Update) -> Update:
        masks, shown = super().censored(observed), observed
        for defense in reversed(self.defenses):
            masks = {name: masks[name] | mask for name, mask in defense.censored(shown).items()}
            if Stage.UPDATE in defense.stages:
                shown = _beyond_limits(observed)  # what acted before may have been scaled: limits are other ones
        return masks

    def largest_hidden(self, observed: Update) -> dict[str, float]:
        # smallest kept magnitudes of the last release are none below those of earlier ones, but for their common scale
        found = [defense.largest_hidden(observed) for defense in self.defenses]
        return {name: max((one[name] for one in found), default=0.0) for name in observed}

    def simulate_share(self, candidate: Update, observed: Update, clients: int) -> Update:
        for number, defense in enumerate(self.defenses, 1):
            # entries that are cut off later may cancel in the mean: its zeros do not say that all clients dropped them
            misled = any(_cuts_off(one, observed) for one in self.defenses[number:]) and not _has_random_masks(defense)
            shown = {name: torch.ones_like(value) for name, value in observed.items()} if misled else observed
            candidate = defense.simulate_share(candidate, shown, clients)
        return candidate

    def require_shares(self) -> None:
        for defense in self.defenses:
            defense.require_shares()

    def require_strength(self) -> None:
        super().require_strength()
        for defense in self.defenses:
            defense.require_strength()

    def released_std(self, n_examples: int) -> float:
        std = 0.0
        for defense in self.defenses:
            if std and defense.stages:
                raise ConfigError(f"no bound is known for {defense} after noise: list the noise last")
            std = defense.released_std(n_examples) or std
        return std

    def released_noise(self, n_examples: int) -> Noise | None:
        noise, before = None, None
        for defense in self.defenses:
            if noise is not None and defense.stages:
                raise ConfigError(f"no density is known for {defense} after noise: list the noise last")
            noise = defense.released_noise(n_examples) or noise
            if noise is not None and before is not None:
                raise ConfigError(
                    f"no density is known for noise after {before}: it hides which coordinates were dropped; "
                    "clip instead, or match a distance such as GlobalCosine"
                )
            before = defense if defense.reads_zeros else before
        return noise

    def adds_noise(self, n_examples: int) -> bool:
        """Whether any of the chained defenses does."""
        return any(defense.adds_noise(n_examples) for defense in self.defenses)

    @property
    def reads_zeros(self) -> bool:
        """Whether that of any of the chained defenses does."""
        return any(defense.reads_zeros for defense in self.defenses)

    @property
    def drops_inputs(self) -> bool:
        """Whether any of the chained defenses does."""
        return any(defense.drops_inputs for defense in self.defenses)

    def without_noise(self) -> Defense:
        return Chain([defense.without_noise() for defense in self.defenses])

    def linearized(
        self, jacobian: Jacobian, round_: Round, generator: torch.Generator
    ) -> tuple[Jacobian, NoisyRelease]:
        release, notes, before = NoisyRelease(), list[str](), None
        for defense in (one for one in self.defenses if one.stages):
            if release.scale is not None:
                raise ConfigError(f"no bound is known for {defense} after noise: list the noise last")
            if before is not None and Stage.PER_EXAMPLE in defense.stages:
                # the Jacobian after the first of them is that of a mean
                raise ConfigError(f"no bound is known for {defense} after {before}: both change single gradients")
            before = defense if Stage.PER_EXAMPLE in defense.stages else before
            moved = jacobian.after(release)
            given, found = defense.linearized(moved, round_, generator)
            notes += found.notes
            masks = given is moved and found.scale is None and found.bound == math.inf
            jacobian, release = (jacobian, release.masked(found)) if masks else (given, found)
        return jacobian, replace(release, notes=tuple(dict.fromkeys(notes)))


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
        return jacobian.released(NoisyRelease(self.released_std(len(round_.batch.images)) or std))


def seen_in_mean(defense: Defense, clients: int) -> Defense | AveragedDefense:
    """The defense as the attacker of the mean of `clients` clients' updates simulates it; errors as above."""
    return defense if clients == 1 else AveragedDefense(defense, clients)


def _cuts_off(defense: Defense, update: Update) -> bool:
    """Whether a defense cuts entries off at a finite largest absolute value."""
    largest = torch.full((1,), torch.finfo(torch.float32).max)
    return any(bool(mask.any()) for mask in defense.censored(dict.fromkeys(update, largest)).values())


def _only_masks(defense: Defense) -> bool:
    """Whether a defense does nothing but set entries to zero, and scale the others alike."""
    if isinstance(defense, PercentilePrivacy):
        return defense.gamma == math.inf
    return isinstance(defense, SparseUpdate | ExcludedVariables)


def _has_random_masks(defense: Defense) -> bool:
    if isinstance(defense, Chain):
        return any(_has_random_masks(part) for part in defense.defenses)
    return isinstance(defense, GradientDropout) and 0 < defense.rate < 1


def _beyond_limits(update: Update) -> Update:
    """Entries that tie at the largest magnitude, enlarged beyond every finite limit, others 0; as it is without ties.

    Entries that were cut off at one value still tie after any scaling of the update.
    """
    largest = max((value.abs().max() for value in update.values() if value.dim() and value.numel()), default=None)
    if largest is None or not 0 < largest < math.inf:
        return update
    tied = {name: (value.abs() >= largest * (1 - TIED)) & (value.dim() > 0) for name, value in update.items()}
    if sum(int(mask.sum()) for mask in tied.values()) < 2:
        return update
    return {name: mask.to(update[name].dtype) * torch.finfo(update[name].dtype).max for name, mask in tied.items()}


def _remedy(acting: Sequence[Defense]) -> str:
    """Advice for a message: an allowed order, or that there is none."""
    by_time = sorted(acting, key=lambda defense: (min(defense.stages), max(defense.stages)))
    if any(max(first.stages) > min(second.stages) for first, second in pairwise(by_time)):
        return "no order of these defenses is allowed; leave one out"
    return f"list them as {by_time}"
