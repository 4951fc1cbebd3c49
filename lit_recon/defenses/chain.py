"""Several defenses applied one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from lit_recon.defenses.base import Batch, BatchNormMode, Defense, Round, Stage
from lit_recon.errors import ConfigError
from lit_recon.models import Backbone
from lit_recon.records import Update


class Chain(Defense):
    """Applies defenses in the order in which they are listed; an empty chain changes nothing.

    That order has to agree with the order of a client's computation: defenses of the batch come first, then those of
    the gradients of single examples, then those of the update. Random numbers are drawn in order of execution.

    The attacker simulates the defenses in the same order, each from the update that the whole chain released: noise
    after pruning hides the mask. The log-likelihood is that of the last defense.

    Args:
        defenses: none, one or several.

    Raises:
        ConfigError: a defense is listed after one of a later stage.

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
                    f"a Chain must list its defenses in the order batch, per_example, update: {second} changes the "
                    f"{min(second.stages).name.lower()} and cannot follow {first}, which changes the "
                    f"{max(first.stages).name.lower()}: {_remedy(acting)}"
                )

    @property
    def stages(self) -> tuple[Stage, ...]:
        """All stages of the chained defenses, in order of execution."""
        return tuple(sorted({stage for defense in self.defenses for stage in defense.stages}))

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

    def released_std(self, n_examples: int) -> float:
        std = 0.0
        for defense in self.defenses:
            if std and defense.stages:
                raise ConfigError(f"no bound is known for {defense} after noise: list the noise last")
            std = defense.released_std(n_examples) or std
        return std

    def without_noise(self) -> Defense:
        return Chain([defense.without_noise() for defense in self.defenses])


def _remedy(acting: Sequence[Defense]) -> str:
    """An order that is allowed, or that there is none."""
    by_time = sorted(acting, key=lambda defense: (min(defense.stages), max(defense.stages)))
    if any(max(first.stages) > min(second.stages) for first, second in pairwise(by_time)):
        return "no order of these defenses is allowed; leave one out"
    return f"list them as {by_time}"
