"""What every recovery of labels, features and maps promises: shapes, determinism, an observation left as it was.

A new recovery joins the table; a test below notices one that did not.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_recon.attacks.updates import (
    IDLG,
    CocktailParty,
    ExactRecovery,
    FeatureRecovery,
    HeadCounts,
    JointLabels,
    KnownLabels,
    LabelRecovery,
    MapRecovery,
    MomentRecovery,
)
from lit_recon.clients import Client
from lit_recon.models import MLP, Backbone, ConvNet
from lit_recon.models.classifiers.feature_layer import WideFeatureLayer
from lit_recon.records import Knowledge, Normalization, Observation
from tests.contracts.discovery import missing

LABELS: list[LabelRecovery] = [KnownLabels(), IDLG(), HeadCounts(trials=20), JointLabels()]
FEATURES: list[FeatureRecovery] = [ExactRecovery(iterations=20), MomentRecovery(), CocktailParty(steps=20)]
MAPS = [MapRecovery()]

Recovery = LabelRecovery | FeatureRecovery | MapRecovery


def observed(recovery: Recovery) -> Observation:
    """A batch of two images, of one for IDLG, from a network that suits the recovery."""
    torch.manual_seed(0)
    trunk = ConvNet((3, 8, 8), [64, 64, 64], norm="none") if isinstance(recovery, MapRecovery) else MLP((3, 8, 8), [20])
    wide = WideFeatureLayer(20, 2048, 1024) if isinstance(recovery, FeatureRecovery) else None
    model = Backbone(trunk, 6, Normalization((0.5,) * 3, (0.25,) * 3), wide)
    labels = torch.tensor([4] if isinstance(recovery, IDLG) else [1, 4])
    given = Knowledge(labels=isinstance(recovery, KnownLabels))
    return Client(model, "eval").observe(torch.rand(len(labels), 3, 8, 8), labels, given)


def tensors(found: Any) -> dict[str, Tensor]:
    parts = dict(enumerate(found)) if isinstance(found, tuple) else vars(found)
    return {str(name): value for name, value in parts.items() if isinstance(value, Tensor)}


def as_projector(name: str, value: Tensor) -> Tensor:
    """A span whatever signs LAPACK gave its columns; other tensors as they are."""
    return value @ value.T if name == "span" else value


@pytest.fixture(params=[*LABELS, *FEATURES, *MAPS], ids=lambda recovery: type(recovery).__name__)
def recovery(request: pytest.FixtureRequest) -> Callable[[Observation], Any]:
    return copy.deepcopy(request.param)


@pytest.mark.parametrize(
    ("interface", "table"),
    [(LabelRecovery, LABELS), (FeatureRecovery, FEATURES), (MapRecovery, MAPS)],
    ids=["labels", "features", "maps"],
)
def test_the_table_holds_every_recovery(interface: type, table: list[object]) -> None:
    assert missing(interface, table) == []


@pytest.mark.parametrize("recovery", LABELS, ids=lambda recovery: type(recovery).__name__)
def test_labels_are_sorted_classes(recovery: LabelRecovery) -> None:
    seen = observed(recovery)
    labels, notes = recovery(seen)
    assert labels.dtype == torch.int64
    assert labels.shape == (seen.n_examples,)
    assert torch.equal(labels, labels.sort().values)
    assert all(note.startswith("labels: ") for note in notes)
    if not recovery.can_optimize:
        assert labels.tolist() == ([4] if isinstance(recovery, IDLG) else [1, 4])


@pytest.mark.parametrize("recovery", FEATURES, ids=lambda recovery: type(recovery).__name__)
def test_features_are_unit_vectors(recovery: FeatureRecovery) -> None:
    found = recovery(observed(recovery))
    assert found.features.shape == (2, 20)
    # float32 rounding is 1e-7
    torch.testing.assert_close(found.features.norm(dim=1), torch.ones(2, dtype=found.features.dtype), atol=1e-5, rtol=0)
    assert not found.features.requires_grad


@pytest.mark.parametrize("recovery", MAPS, ids=lambda recovery: type(recovery).__name__)
def test_maps_have_the_shape_of_the_layers_input(recovery: MapRecovery) -> None:
    found = recovery(observed(recovery))
    assert found.maps.shape == (2, *found.convolution.shape)
    assert not found.maps.requires_grad


def test_is_deterministic_and_leaves_observation_and_generator_as_they_were(recovery: Any) -> None:
    seen = observed(recovery)
    before, state = copy.deepcopy(dict(seen.update)), torch.get_rng_state()
    first = tensors(recovery(seen))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(123)
    second = tensors(recovery(seen))
    assert first
    assert first.keys() == second.keys()
    for name, value in first.items():
        # the same computation may round otherwise where its memory is aligned otherwise: 4e-15 was seen
        torch.testing.assert_close(as_projector(name, second[name]), as_projector(name, value), atol=1e-6, rtol=0)
    assert all(torch.equal(value, before[name]) for name, value in seen.update.items())
