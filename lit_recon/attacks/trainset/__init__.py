"""Attacks on a released model by someone who knows none or few of its training images."""

from __future__ import annotations

from lit_recon.attacks.trainset.base import Candidates, ReleasedModel, TrainsetAttack
from lit_recon.attacks.trainset.bilevel import DampedBilevel, ImplicitBilevel, UnrolledBilevel
from lit_recon.attacks.trainset.inactive import InactiveNeurons
from lit_recon.attacks.trainset.kkt import MarginKKT, Stationarity
from lit_recon.attacks.trainset.known_start import KnownStart
from lit_recon.attacks.trainset.repeated import RepeatedTraining
from lit_recon.attacks.trainset.training import Training

__all__ = [
    "Candidates",
    "DampedBilevel",
    "ImplicitBilevel",
    "InactiveNeurons",
    "KnownStart",
    "MarginKKT",
    "ReleasedModel",
    "RepeatedTraining",
    "Stationarity",
    "Training",
    "TrainsetAttack",
    "UnrolledBilevel",
]
