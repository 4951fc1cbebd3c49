"""Interim label recovery so that the room imports; its owner replaces this file."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from lit_recon.errors import ThreatModelError
from lit_recon.records import Observation


class LabelRecovery(ABC):
    optimised: bool = False

    @abstractmethod
    def __call__(self, observation: Observation) -> tuple[Tensor, tuple[str, ...]]: ...

    def initial_logits(self, observation: Observation, generator: torch.Generator) -> Tensor:
        raise ThreatModelError("not optimised")


class KnownLabels(LabelRecovery):
    def __call__(self, observation: Observation) -> tuple[Tensor, tuple[str, ...]]:
        if observation.labels is None:
            raise ThreatModelError("KnownLabels needs knowledge.labels")
        return observation.labels.sort().values, ()


class IDLG(LabelRecovery):
    def __call__(self, observation: Observation) -> tuple[Tensor, tuple[str, ...]]:
        return observation.update["head.bias"].argmin().view(1), ()


class HeadCounts(LabelRecovery):
    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def __call__(self, observation: Observation) -> tuple[Tensor, tuple[str, ...]]:
        order = observation.update["head.bias"].argsort()
        return order[: observation.n_examples].sort().values, ()


class JointLabels(LabelRecovery):
    optimised = True

    def __call__(self, observation: Observation) -> tuple[Tensor, tuple[str, ...]]:
        return torch.zeros(observation.n_examples, dtype=torch.int64), ()

    def initial_logits(self, observation: Observation, generator: torch.Generator) -> Tensor:
        return torch.randn(observation.n_examples, observation.n_classes, generator=generator)
