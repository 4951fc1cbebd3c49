"""Several defenses, one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from lit_recon.defenses.base import Batch, BatchNormMode, Defense, Round
from lit_recon.errors import ConfigError
from lit_recon.models import Backbone
from lit_recon.records import Update


class Chain(Defense):
    """Applies defenses in the order in which they are listed; an empty chain is the identity.

    That order has to agree with the order of a round: what acts on the batch comes first, then what acts on the
    gradients of single examples, then what acts on the update. Random numbers are drawn in the order of action.

    The attacker applies the counterparts in the same order, each with the update that he sees: what the whole chain
    released. Noise after pruning thus hides the mask from him. He has a log-likelihood where the last defense has one.

    Args:
        defenses: none, one or several.

    Raises:
        ConfigError: a defense is listed after one that acts later in the round.

    >>> from lit_recon.defenses import GaussianNoise, PerExampleClipping
    >>> Chain([PerExampleClipping(bound=1.0), GaussianNoise(std=0.1)]).stages
    (<Stage.PER_EXAMPLE: 2>, <Stage.UPDATE: 3>)
    """

    def __init__(self, defenses: Sequence[Defense] = ()) -> None:
        self.defenses = list(defenses)
        acting = [defense for defense in self.defenses if defense.stages]
        for first, second in pairwise(acting):
            if max(first.stages) > min(second.stages):
                raise ConfigError(
                    f"a Chain runs in the order of a round (batch, per_example, update): {second} acts on the "
                    f"{min(second.stages).name.lower()} and cannot follow {first}, which acts on the "
                    f"{max(first.stages).name.lower()}: {_remedy(acting)}"
                )
        self.stages = tuple(sorted({stage for defense in acting for stage in defense.stages}))

    def prepare(self, model: Backbone, batch_norm: BatchNormMode = "eval") -> Backbone:
        for defense in self.defenses:
            model = defense.prepare(model, batch_norm)
        return model

    def transform_batch(self, batch: Batch, model: Backbone, generator: torch.Generator) -> Batch:
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

    def simulate_buffers(
        self, buffers: Mapping[str, Tensor], observed: Update, n_examples: int
    ) -> Mapping[str, Tensor]:
        for defense in self.defenses:
            buffers = defense.simulate_buffers(buffers, observed, n_examples)
        return buffers

    def simulate_per_example(self, gradients: Update) -> Update:
        for defense in self.defenses:
            gradients = defense.simulate_per_example(gradients)
        return gradients

    def simulate(self, candidate: Update, observed: Update) -> Update:
        for defense in self.defenses:
            candidate = defense.simulate(candidate, observed)
        return candidate

    def log_likelihood(self, candidate: Update, observed: Update, n_examples: int) -> Tensor | None:
        return self.defenses[-1].log_likelihood(candidate, observed, n_examples) if self.defenses else None


def _remedy(acting: Sequence[Defense]) -> str:
    """The order that would do, or that there is none."""
    by_time = sorted(acting, key=lambda defense: (min(defense.stages), max(defense.stages)))
    if any(max(first.stages) > min(second.stages) for first, second in pairwise(by_time)):
        return "no order of these defenses will do; leave one out"
    return f"list them as {by_time}"
