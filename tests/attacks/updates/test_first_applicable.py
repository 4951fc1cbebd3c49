"""The first attack of a list that can work on an update is used."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_recon.attacks.updates import (
    AnalyticInversion,
    BatchNormPrior,
    FeatureMatching,
    FeaturesOnly,
    FirstApplicable,
    GenerativePrior,
    GradientMatching,
    HeadCounts,
    InputMatching,
    KnownLabels,
    MapMatching,
    MapRecovery,
    PatchMatching,
    SquaredError,
)
from lit_recon.attacks.updates.feature_maps import matching
from lit_recon.defenses import GradientPruning
from lit_recon.errors import ConfigError, ThreatModelError, UnsupportedModelError
from lit_recon.models import MLP, Backbone
from lit_recon.models.generative.generator import ConvGenerator, GeneratorCheckpoint, save_generator
from lit_recon.modules.attack_state import run_attack
from lit_recon.records import Knowledge, Normalization, Observation
from tests.attacks.updates.feature_maps.networks import backbone, observed


def attack() -> FirstApplicable:
    maps = GradientMatching(FeaturesOnly(), features=MapMatching(further=0), steps=2)
    return FirstApplicable([maps, GradientMatching(SquaredError(), steps=1)])


def test_the_first_attack_that_can_work_does(photographs: Tensor) -> None:
    seen = observed(photographs[:2, :, ::2, ::2], backbone(side=16))
    begun = attack().begin([seen])
    assert begun.reasons == ()
    assert begun.n_steps == 2
    assert begun.state is not None
    assert begun.state.step == 0
    (note,) = [note for note in attack().many([seen])[0].notes if "maps recovered" in note]
    assert "trunk.blocks.4.conv1" in note


def test_another_is_used_and_the_reason_is_noted(photographs: Tensor) -> None:
    seen = observed(photographs[:2, :, ::2, ::2], backbone(side=16), defense=GradientPruning(0.99))
    result = attack()(seen)
    assert result.notes[0].startswith(
        "attack 1 of 2 not applicable: no convolution determines the maps of a batch of 2"
    )
    assert torch.isfinite(result.images).all()


def test_a_reason_that_two_attacks_share_is_noted_once(photographs: Tensor) -> None:
    seen = observed(photographs[:2, :, ::2, ::2], backbone(side=16), defense=GradientPruning(0.99))
    maps, last = attack().attacks
    result = FirstApplicable([maps, maps, last])(seen)
    told = [note for note in result.notes if "not applicable" in note]
    assert len(told) == 1
    assert told[0].startswith("attacks 1 and 2 of 3 not applicable: no convolution determines the maps of a batch of 2")


def test_images_stay_where_no_further_attack_can_work(photographs: Tensor) -> None:
    seen, first = observed(photographs[:1, :, ::2, ::2], backbone(side=16)), attack().attacks[0]
    for_noise = GradientMatching(FeaturesOnly(), features=PatchMatching(least_hidden=0.5), steps=1)
    alone, result = first(seen), FirstApplicable([first, for_noise])(seen)
    assert alone.certified is not None
    assert not alone.certified.any()
    torch.testing.assert_close(result.images, alone.images)
    assert result.notes == (
        *alone.notes, "no further attack of 2 is applicable: there is no noise to hide the maps"
    )  # fmt: skip
    with pytest.raises(UnsupportedModelError, match="there is no noise to hide the maps"):
        FirstApplicable([for_noise, for_noise])(seen)
    with pytest.raises(UnsupportedModelError, match="there is no noise to hide the maps"):
        FirstApplicable([for_noise, for_noise]).rehearse([seen])
    FirstApplicable([first, for_noise]).rehearse([seen])


def test_images_stay_where_the_update_lacks_what_a_further_attack_needs(photographs: Tensor) -> None:
    torch.manual_seed(0)
    model = Backbone(MLP((3, 32, 32), [16, 16]), 5, Normalization((0.5,) * 3, (0.25,) * 3))
    seen, first = observed(photographs[:1], model, defense=GradientPruning(0.8)), AnalyticInversion()
    on_inputs = GradientMatching(FeaturesOnly(), features=InputMatching(), steps=1)
    alone, result = first(seen), FirstApplicable([first, on_inputs])(seen)
    assert alone.n_certified == 0
    torch.testing.assert_close(result.images, alone.images)
    assert result.notes[:-1] == alone.notes
    assert "no further attack of 2 is applicable: the gradient of trunk.layers.2 is not spanned" in result.notes[-1]
    with pytest.raises(ThreatModelError, match="not spanned"):
        FirstApplicable([on_inputs, on_inputs])(seen)


def test_the_last_attack_has_to_work(photographs: Tensor) -> None:
    seen = observed(photographs[:2, :, ::2, ::2], backbone(side=16), defense=GradientPruning(0.99))
    needy = FirstApplicable([attack().attacks[0], GradientMatching(labels=KnownLabels())])
    with pytest.raises(ThreatModelError, match="labels"):
        needy(seen)
    needy = FirstApplicable([attack().attacks[0], GradientMatching(priors=[BatchNormPrior(1.0)])])
    with pytest.raises(ThreatModelError, match="BatchNormPrior needs BatchNorm statistics"):
        needy.check([replace(observed(photographs[:2]), knowledge=Knowledge(batch_norm="none"))])
    with pytest.raises(ConfigError, match="two or more"):
        FirstApplicable([attack().last])
    with pytest.raises(ConfigError, match="none of them another FirstApplicable"):
        FirstApplicable([attack(), attack().last])


@pytest.mark.parametrize("fraction", [None, 0.9999])  # nearly nothing left: no map on any processor
def test_labels_and_maps_are_recovered_once(
    photographs: Tensor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fraction: float | None
) -> None:
    calls: list[str] = []
    for kind in (MapRecovery, HeadCounts):

        def counted(self: Any, seen: Observation, plain: Any = kind.__call__, name: str = kind.__name__) -> Any:
            calls.append(name)
            return plain(self, seen)

        monkeypatch.setattr(kind, "__call__", counted)
    for limit in ("ANGLE", "EXPLAINED"):  # two steps certify no image, and others would follow
        monkeypatch.setattr(matching, limit, 2.0)
    defense = None if fraction is None else GradientPruning(fraction)
    seen = observed(photographs[:1, :, ::2, ::2], backbone(side=16), defense=defense)
    result = attack()(seen)
    assert sorted(calls) == ["HeadCounts", "MapRecovery"]  # also where the maps are not applicable
    resumable = run_attack(attack(), [seen], tmp_path / "saved", 60, None, lambda state, n: None)
    assert sorted(calls) == ["HeadCounts"] * 2 + ["MapRecovery"] * 2
    assert torch.equal(resumable.reconstructions[0].images, result.images)


def test_what_a_driver_asks_is_answered_by_the_attacks_in_the_list(tmp_path: Path, photographs: Tensor) -> None:
    search = GradientMatching(parametrization=generative_prior(tmp_path), features=FeatureMatching(), steps=7)
    both = FirstApplicable([search, search])
    assert both.recovers_features
    assert not FirstApplicable([search, attack().last]).recovers_features
    assert both.planned_steps == 7
    assert [seen.tolist() for seen in both.training_images.values()] == [[5]]
    assert both.execution_for(2) is None
    needy = FirstApplicable([attack().attacks[0], GradientMatching(labels=KnownLabels())])
    with pytest.raises(ThreatModelError, match="labels"):
        needy.rehearse([observed(photographs[:1, :, ::2, ::2], backbone(side=16))])


def generative_prior(folder: Path) -> GenerativePrior:
    """A generator that knows the fingerprints of its training images."""
    path = folder / "generator.safetensors"
    generator = ConvGenerator((3, 16, 16), latent_size=4, width=4)
    save_generator(path, GeneratorCheckpoint(generator, data="", split_hash="", seen=torch.tensor([5]), epoch=0))
    return GenerativePrior(path)
