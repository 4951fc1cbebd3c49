"""Records refuse what they cannot mean."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from lit_recon.clients import Client
from lit_recon.errors import LitReconError, ShapeError
from lit_recon.models import MLP, Backbone
from lit_recon.records import Knowledge, Normalization, Observation


@pytest.fixture
def seen() -> Observation:
    torch.manual_seed(0)
    model = Backbone(MLP((1, 4, 4), [8]), 3, Normalization((0.5,), (0.5,)))
    return Client(model).observe(torch.rand(2, 1, 4, 4), torch.tensor([0, 2]), Knowledge(labels=True))


@pytest.mark.parametrize(("mean", "std"), [((0.5,), (0.5, 0.5)), ((), ()), ((0.5,), (0.0,)), ((0.5,), (-1.0,))])
def test_normalization_needs_matching_positive_numbers(mean: tuple, std: tuple) -> None:
    with pytest.raises(ShapeError):
        Normalization(mean, std)


def test_observation_refuses_inconsistencies(seen: Observation) -> None:
    name = next(iter(seen.update))
    wrong = {
        "example": {"n_examples": 0},
        "differ": {"update": {k: v for k, v in seen.update.items() if k != name}},
        "shape": {"update": {**seen.update, name: torch.zeros(7)}},
        "NaN": {"update": {**seen.update, name: torch.full_like(seen.update[name], torch.nan)}},
        "labels": {"labels": None},
        "batch_statistics": {"knowledge": Knowledge(labels=True, batch_norm="batch")},
    }
    for message, change in wrong.items():
        with pytest.raises(ShapeError, match=message) as caught:
            dataclasses.replace(seen, **change)
        assert isinstance(caught.value, LitReconError)
