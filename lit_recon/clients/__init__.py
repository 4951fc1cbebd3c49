"""Clients: the forward operators from private data to an update, and the attacker's observation of it."""

from __future__ import annotations

from lit_recon.clients.aggregate import SecureAggregation
from lit_recon.clients.client import Client, ClientSettings, LocalTraining, Rule
from lit_recon.clients.gradient import GradientOperator
from lit_recon.clients.local_steps import LocalSteps
from lit_recon.records import BatchNormMode

__all__ = [
    "BatchNormMode",
    "Client",
    "ClientSettings",
    "GradientOperator",
    "LocalSteps",
    "LocalTraining",
    "Rule",
    "SecureAggregation",
]
