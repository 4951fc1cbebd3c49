"""Forward operators: what a client computes from its data, and what an attacker sees of it."""

from __future__ import annotations

from lit_recon.observation.aggregate import SecureAggregation, aggregate
from lit_recon.observation.client import Client, Rule
from lit_recon.observation.gradient import GradientOperator
from lit_recon.observation.local_steps import LocalSteps
from lit_recon.observation.norms import BatchNormMode
from lit_recon.observation.settings import ClientSettings, LocalTraining

__all__ = [
    "BatchNormMode",
    "Client",
    "ClientSettings",
    "GradientOperator",
    "LocalSteps",
    "LocalTraining",
    "Rule",
    "SecureAggregation",
    "aggregate",
]
