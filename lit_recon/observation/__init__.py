"""Forward operators: what a client computes from its data, and what an attacker sees of it."""

from __future__ import annotations

from lit_recon.observation.client import Client
from lit_recon.observation.gradient import GradientOperator
from lit_recon.observation.norms import BatchNormMode

__all__ = ["BatchNormMode", "Client", "GradientOperator"]
