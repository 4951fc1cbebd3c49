"""Attacks after a transfer to another fixed set, and what their pages and records say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lit_recon.attacks.released import BlackBox, FirstLayerRidge
from lit_recon.attacks.shadow import GradientDescent, LinearResponse, PrivateDescent
from lit_recon.data.informed_splits import InformedSplitSettings
from lit_recon.errors import ThreatModelError
from lit_recon.experiments.factors.measures import Transfer
from lit_recon.experiments.factors.settings import TransferSettings
from lit_recon.experiments.released_attack.settings import ReconnSettings, ShadowSettings
from lit_recon.metrics import NearestPublic
from lit_recon.reporting.record import read_metrics
from lit_recon.reporting.run_folder import RunFolder


def test_spare_shadow_targets_are_unseen_images_only_if_they_are_of_the_same_source() -> None:
    shadows, how = ShadowSettings(split=InformedSplitSettings(20, 80, 6)), TransferSettings(30)
    split = shadows.drawn()
    for foreign, spare in ((False, 50), (True, 0)):
        found = Transfer(how, ReconnSettings(), shadows, replace(split, foreign=foreign)).split
        assert split.rest is not None
        assert len(found.unseen) == len(split.rest) + spare
        assert torch.equal(found.unseen.images[:20], split.fixed.images)
        assert torch.equal(found.unseen.images[20 : len(split.rest)], split.rest.images[20:])
        assert torch.equal(found.unseen.labels[len(split.rest) :], split.shadow.labels[30 : 30 + spare])


def test_who_needs_the_training_is_told_it_or_refused(tmp_path: Path) -> None:
    shadows = ShadowSettings(
        split=InformedSplitSettings(20, 80, 6),
        descent=GradientDescent(steps=10),
        execution="batched_mlp",
        cache=tmp_path,
    )
    first, old = ReconnSettings(reconstructor=FirstLayerRidge()), shadows.drawn()
    scratch = Transfer(TransferSettings(70, "scratch"), first, shadows, old)
    plan = shadows.plan(scratch.split)
    with pytest.raises(ThreatModelError, match="knows its fixed set: use KernelRidge"):
        Transfer(TransferSettings(70), first, shadows, old).attack(plan)
    folder = RunFolder.open(tmp_path / "run", "seed: 0")
    scratch.run(folder)
    metrics = read_metrics(folder.metrics)
    assert metrics["rank_one_share"] > 0.99
    assert metrics["mse"] < 0.8 * metrics["baseline_mean_image_mse"]


@pytest.mark.parametrize("n", [0, 30])
def test_who_adapts_a_reconstructor_holds_the_images_of_both_sets(tmp_path: Path, n: int) -> None:
    shadows = ShadowSettings(
        split=InformedSplitSettings(20, 80, 6),
        descent=GradientDescent(steps=10),
        execution="batched_mlp",
        cache=tmp_path,
    )
    adapted = Transfer(TransferSettings(n), ReconnSettings(), shadows, shadows.drawn())
    folder = RunFolder.open(tmp_path / "run", "seed: 0")
    adapted.run(folder)
    held = torch.cat([adapted.split.fixed.images, adapted.old.fixed.images, adapted.old.shadow.images])
    nearest = NearestPublic(held).query(adapted.split.targets.pixels())[1]
    assert torch.equal(load_file(folder.reconstructions)["nearest_public"], nearest)
    metrics = read_metrics(folder.metrics)
    assert [metrics[key] for key in ("n_shadow", "n_fixed_before", "n_shadow_before")] == [n, 20, 80]


@pytest.mark.slow
@pytest.mark.parametrize("n", [0, 30])
def test_the_page_of_a_transfer_says_what_the_adversary_saw_and_how_its_models_were_made(
    tmp_path: Path, n: int
) -> None:
    shadows = ShadowSettings(
        split=InformedSplitSettings(20, 80, 6),
        descent=GradientDescent(steps=10),
        shadows="linear",
        linear=LinearResponse(sample=4, tolerance=1.0),
        execution="batched_mlp",
        cache=tmp_path / "cache",
    )
    base = ReconnSettings(access=BlackBox(images=9))
    folder = RunFolder.open(tmp_path / "run", "seed: 0")
    Transfer(TransferSettings(n), base, shadows, shadows.drawn()).run(folder)
    metrics = read_metrics(folder.metrics)
    assert (metrics["n_features"], metrics["n_linear"], metrics["linear_error_n"]) == (90, n or 80, 4)
    words, notes = " were made by linear response: on 4 models", json.loads(folder.metrics.read_text())["notes"]
    made = [note for note in notes if words in note]
    new = ["30 of the 30 shadow models"] * (n > 0)
    assert [note.partition(words)[0] for note in made] == ["First training set: 80 of the 80 shadow models", *new]
    page = folder.report.read_text()
    assert "Of the released model its logits for 9 images, its architecture" in page
    assert "Its weights." in page
    assert made[0] in page


def test_the_page_of_a_private_transfer_names_noise_and_snapshots(tmp_path: Path) -> None:
    shadows = ShadowSettings(
        split=InformedSplitSettings(20, 40, 6),
        descent=GradientDescent(steps=4, snapshots=[2], dp=PrivateDescent(target_epsilon=10.0)),
        execution="loop",
        cache=tmp_path / "cache",
    )
    folder = RunFolder.open(tmp_path / "run", "seed: 0")
    Transfer(TransferSettings(10, "scratch"), ReconnSettings(), shadows, shadows.drawn()).run(folder)
    metrics = read_metrics(folder.metrics)
    assert metrics["epsilon"] == pytest.approx(10)
    assert metrics["released_steps"] == "2, 4"
    page = folder.report.read_text()
    assert "The noise of the released model&#39;s training, with an epsilon of 10." in page
    assert "The same after several steps of training: 2, 4." in page
