"""The strongest attack that can work on an update takes its turn."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lit_recon.defenses import GradientPruning
from lit_recon.errors import ConfigError, ThreatModelError
from lit_recon.inversion import (
    FeaturesOnly,
    GradientMatching,
    InTurn,
    KnownLabels,
    MapMatching,
    MapRecovery,
    SquaredError,
)
from tests.inversion.maps.test_recovery import backbone, observed


def attack() -> InTurn:
    maps = GradientMatching(FeaturesOnly(), features=MapMatching(), steps=2)
    return InTurn([maps, GradientMatching(SquaredError(), steps=1)])


def test_the_first_attack_that_can_work_does(photographs: Tensor) -> None:
    seen = observed(photographs[:2], backbone())
    chosen, reasons = attack().chosen([seen])
    assert isinstance(chosen, GradientMatching)
    assert isinstance(chosen.features, MapMatching)
    assert reasons == ()
    (note,) = [note for note in attack().many([seen])[0].notes if "maps recovered" in note]
    assert "trunk.blocks.6.conv1" in note


def test_another_takes_its_turn_and_the_reason_is_noted(photographs: Tensor) -> None:
    seen = observed(photographs[:2], backbone(), defense=GradientPruning(0.5))
    result = attack()(seen)
    assert result.notes[0].startswith("attack 1 of 2 made way: no convolution gives the maps of a batch of 2 away")
    assert torch.isfinite(result.images).all()


def test_the_last_attack_has_to_work(photographs: Tensor) -> None:
    seen = observed(photographs[:2], backbone("gelu"))
    needy = InTurn([attack().attacks[0], GradientMatching(labels=KnownLabels())])
    with pytest.raises(ThreatModelError, match="labels"):
        needy(seen)
    with pytest.raises(ConfigError, match="two or more"):
        InTurn([attack().last])
    with pytest.raises(ConfigError, match="none of them another InTurn"):
        InTurn([attack(), attack().last])


def test_maps_are_recovered_once_for_two_looks(photographs: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    recover = MapRecovery.__call__
    monkeypatch.setattr(MapRecovery, "__call__", lambda self, seen: (calls.append(1), recover(self, seen))[1])
    attack()(observed(photographs[:1], backbone()))
    assert len(calls) == 1
