"""Studies of training sets: cells, growth, refusals, selection, the test for members."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from lit_recon.attacks.trainset.base import ReleasedModel
from lit_recon.attacks.trainset.training import Training
from lit_recon.cli import attack
from lit_recon.data.sources import Digits
from lit_recon.errors import ConfigError, ThreatModelError
from lit_recon.experiments.trainset import released
from lit_recon.experiments.trainset import run as command
from lit_recon.experiments.trainset.page import _claimed, _reconstructions
from lit_recon.experiments.trainset.released import ModelTraining, TrainingSet, candidates_of, network_of, training_set
from lit_recon.experiments.trainset.results import ClaimRate, SeedMean, TrainsetGroup, TrainsetStudy
from lit_recon.experiments.trainset.score import SAME_POOL
from lit_recon.experiments.trainset.settings import (
    KnownSettings,
    MembershipTest,
    ReleasedFiles,
    SeedSettings,
    TrainingSetSettings,
    TrainsetSettings,
    released_models,
)
from lit_recon.experiments.trainset.starts import NoiseStart, OtherPartitionStart, TruthStart
from tests.experiments.trainset.attack import SmallAttack

STARTS = "lit_recon.experiments.trainset.starts"
SMALL = "tests.experiments.trainset.attack.SmallAttack"
CONTENT: dict[str, Any] = {
    "name": "tiny",
    "data": {"class_path": "Digits"},
    "examples": {"classes": {0: 0, 1: 1, 7: 1}, "per_class": 3, "n_public": 60},
    "network": {"class_path": "lit_recon.models.centered.CenteredMLP", "init_args": {"hidden": [6]}},
    "training": {"steps": 30, "lr": 0.5},
    "attacks": {"small": {"class_path": SMALL}},
    "starts": {
        "noise": {"class_path": f"{STARTS}.NoiseStart", "init_args": {"scale": 0.2}},
        "mixture": {"class_path": f"{STARTS}.MixtureStart", "init_args": {"shares": [0.5, 1.0]}},
    },
    "defenses": {"stopped": {"steps": 2}},
    "seeds": {"trainings": 2, "restarts": 2},
    "membership": {"tested": 2, "starts": ["noise"]},
    "threads": 1,
    "wandb": {"mode": "disabled"},
}

#: With one candidate for each of six images, which a model without one of them has no place for.
REPEATED = {"attacks": {"repeated": {"class_path": "RepeatedTraining"}}, "known": {"start": True}, "candidates": 1}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., int]:
    """The command on the content with changes, in a folder of this module."""
    place = tmp_path_factory.mktemp("trainset")

    def run(out: Path, **changes: Any) -> int:
        config = place / "tiny.yaml"
        config.write_text(yaml.safe_dump({**CONTENT, **changes}, sort_keys=False))
        with pytest.MonkeyPatch.context() as patch:  # pages take a second each; one test builds one
            patch.setattr(command, "write_page", lambda folder: folder)
            return attack(["trainset", "--config", str(config), "--out", str(out)])

    return run


@pytest.fixture(scope="module")
def study(start: Callable[..., int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    assert start(folder) == 0
    return folder


def settings(**changes: Any) -> TrainsetSettings:
    own: dict[str, Any] = {
        "data": Digits(),
        "examples": TrainingSetSettings({0: 0, 1: 1, 7: 1}, 3),
        "attacks": {"small": SmallAttack()},
        "starts": {"noise": NoiseStart()},
    }
    return TrainsetSettings(**{**own, **changes})


def test_every_cell_has_results_images_and_a_row_per_training_image(study: Path) -> None:
    cells = sorted((study / "cells").iterdir())
    assert len(cells) == 2 * 2 * 3  # seeds, defenses, starts with their shares
    with (study / "images.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 12 * 6
    metrics = json.loads((study / "metrics.json").read_text())
    own = [float(row["ssim"]) for row in rows if (row["start"], row["defense"]) == ("noise", "none")]
    assert metrics["ssim.small.noise_0.none"] == pytest.approx(sum(own) / 12)
    assert metrics["pool.small.noise_0.none"] == 2 * 2 * 6
    assert metrics["n_images.small.noise_0.none"] == 6
    tensors = load_file(cells[0] / "reconstructions.safetensors")
    assert tensors["candidates"].shape == (24, 1, 8, 8)
    assert tensors["matched"].shape == tensors["truths"].shape == (6, 1, 8, 8)
    assert 0 <= float(tensors["candidates"].min()) <= float(tensors["candidates"].max()) <= 1


def test_an_attack_that_starts_at_the_truth_has_it_and_a_worse_start_has_less(study: Path) -> None:
    metrics = json.loads((study / "metrics.json").read_text())
    ssim = {share: metrics[f"ssim.small.{share}.none"] for share in ("noise_0", "mixture_0.5", "mixture_1")}
    assert ssim["mixture_1"] > 0.99  # 1.000
    assert ssim["noise_0"] + 0.1 < ssim["mixture_0.5"] < ssim["mixture_1"] - 0.01  # 0.11, 0.79
    assert metrics["residual_before.small.noise_0.none"] > 0
    assert metrics["stationarity_before.small.mixture_1.none"] < metrics["stationarity_before.small.noise_0.none"] - 0.1
    assert (
        metrics["selected_by_truth_ssim.small.noise_0.none"] >= metrics["selected_by_agreement_ssim.small.noise_0.none"]
    )


def test_the_page_states_truth_in_starts_and_the_test_for_members(study: Path) -> None:
    assert attack(["report", str(study)]) == 0
    page = (study / "report.html").read_text()
    for text in (
        "Truth in the start",
        "Do reconstructions show members?",
        "Defenses of training",
        "nearest public image",
        "so for the training images only where the training has converged",
    ):
        assert text in page
    assert "0.5 times a training image" in page


def test_fewer_public_images_than_candidates_are_counted(study: Path) -> None:
    found = TrainsetStudy.read(study)
    assert found.best.n_compared == found.best.cells[0]["pool"] == 24
    assert "nearest of as many public images as candidates" in found.summary()[-1]
    few = replace(found, groups=[replace(g, cells=[{**cell, "n_public": 5} for cell in g.cells]) for g in found.groups])
    assert "nearest of all 5 public images these are" in few.summary()[-1]
    panels = [_reconstructions(own) for own in (found, few)]
    rows = [next(row for row in panel.rows if row[0] == SAME_POOL) for panel in panels]
    assert [row[2] for row in rows] == ["24", "5"]
    said = "There are 5 public images, fewer than candidates."
    assert [said in panel.lead for panel in panels] == [False, True]
    assert "do not compare with those of the literature" in panels[0].note


def test_an_attack_that_started_at_the_truth_is_not_named_as_closest_without_it(study: Path) -> None:
    found = TrainsetStudy.read(study)
    defended = replace(found, groups=[g for g in found.groups if g.share > 0 or g.defense != "none"])
    assert defended.best.key == "small.noise_0.stopped"
    assert defended.summary()[-1].startswith("Closest without the truth in its start: small from noise, stopped")
    true = replace(found, groups=found.where(lambda group: group.share > 0))
    said = "No result is from a start without the truth. Closest, with a share of 1 of it in its start: small from"
    assert true.summary()[-1].startswith(said)


def test_claims_are_about_as_many_members_as_others(study: Path) -> None:
    found = TrainsetStudy.read(study)
    [tested] = found.where(lambda group: group.start == "noise" and group.defense == "none")
    claims = [claim for cell in tested.cells for claim in cell["claims"]]
    assert [claim["member"] for claim in claims].count(True) == 4
    for claim in claims:
        assert claim["claimed"] == (claim["without_rmse"] > 1.1 * claim["with_rmse"])
    record = found.record()
    assert record["true_positives_trainings.small.noise_0.none"] == 2
    mean = tested.claims()["true_positives"].mean
    assert record["true_positives_high.small.noise_0.none"] == mean.value + (mean.half or 0)
    [other] = found.where(lambda group: group.share == 0.5 and group.defense == "none")
    assert not any(cell["claims"] for cell in other.cells)


def group_of(*claimed: list[bool]) -> TrainsetGroup:
    """With such tests of members, and one of an image that is none, for every training."""
    cells = [
        {"claims": [{"member": True, "claimed": one} for one in own] + [{"member": False, "claimed": False}] * len(own)}
        for own in claimed
    ]
    return TrainsetGroup("small", "noise", 0.0, "none", cells)


def test_rates_of_claims_are_means_over_trainings_whose_tests_are_not_independent() -> None:
    rates = group_of([True, True, True, False], [True, False], []).claims()
    assert rates["true_positives"] == ClaimRate(6, 2, SeedMean.of([0.75, 0.5]))
    assert _claimed(rates["true_positives"])[0].startswith("62\N{NO-BREAK SPACE}% ± 159")
    assert rates["false_positives"].mean.value == 0
    one = group_of([True, False]).claims()["true_positives"]
    assert one.mean.half is None
    assert _claimed(one) == ("50\N{NO-BREAK SPACE}%", "2")
    assert not group_of([]).claims()


def test_finished_cells_are_kept_when_a_study_grows(start: Callable[..., int], study: Path, capsys: Any) -> None:
    before = {path: path.stat().st_mtime_ns for path in study.glob("*/*/*") if path.parent.parent.name != "logs"}
    more = {**CONTENT["attacks"], "longer": {"class_path": SMALL, "init_args": {"steps": 4}}}
    starts = {"noise": CONTENT["starts"]["noise"]}
    assert start(study, attacks=more, starts=starts) == 0
    assert "6 of them done" not in capsys.readouterr().out
    after = {path: path.stat().st_mtime_ns for path in before}
    assert after == before
    assert {group.key for group in TrainsetStudy.read(study).groups} >= {"longer.noise_0.stopped", "small.noise_0.none"}
    [model, *_] = study.glob("models/none-s0-*/model.safetensors")
    header, tensors = released.MODEL_FORMAT.read(model)
    released.MODEL_FORMAT.write(model, tensors, {**header, "split_hash": "former"})  # images were replaced since
    assert start(study, attacks=more, seeds={"trainings": 3, "restarts": 2}) == 2
    assert "holds cells on other images (hash former, here " in capsys.readouterr().err
    released.MODEL_FORMAT.write(model, tensors, header)


def test_answers_of_a_study_with_other_starts_do_not_stay(start: Callable[..., int], tmp_path: Path) -> None:
    small: dict[str, Any] = {"seeds": {}, "membership": None, "defenses": {}}
    assert start(tmp_path, starts={"noise": CONTENT["starts"]["noise"]}, **small) == 0
    assert (tmp_path / "hypotheses.csv").is_file()
    assert start(tmp_path, starts={"truth": {"class_path": f"{STARTS}.TruthStart"}}, **small) == 0
    assert not (tmp_path / "hypotheses.csv").exists()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"attacks": {"small": {"class_path": SMALL, "init_args": {"max_loss": -1}}}}, "attacks.small, starts.noise"),
        ({"examples": {"per_class": 3}}, "needs labels 0 and 1"),
        ({"examples": {"classes": {0: 0, 1: 2}}}, "without a gap"),
        ({"examples": {"classes": {0: 0, 11: 1}}}, "names classes [11]"),
        ({"examples": {"classes": {0: 0, 1: 1}, "per_class": 500}}, "lower examples.per_class"),
        ({"defenses": {"none": {}}}, "leave 'none' out"),
        ({"defenses": {"other": {"task": "regression"}}}, "defenses.other must not change the task"),
        ({"defenses": {"other": {"steps": 0}}}, "defenses.other: a training needs steps"),
        ({"defenses": {"other": {"stop": 0}}}, "defenses.other: "),
        ({"membership": {"starts": ["truth"]}}, "membership.starts must be among noise, mixture"),
        ({"known": {"images": 2}}, "leave out membership or known.images"),
        ({"training": {"steps": 30, "parts": 2}}, "leave out membership or training.parts"),
        (REPEATED, "attacks.repeated, starts.noise, without one training image: RepeatedTraining needs to know all"),
        (REPEATED, "give 5 candidates; or leave the attack out of membership.attacks"),
        ({"candidates": 0}, "candidates must be at least 1"),
        ({"attacks": {}}, "at least one attack"),
        ({"network": {"class_path": "torch.nn.Linear"}}, "the network cannot be built"),
    ],
)
def test_bad_input_is_refused_before_any_training(
    start: Callable[..., int], tmp_path: Path, capsys: Any, changes: dict[str, Any], complaint: str
) -> None:
    assert start(tmp_path / "run", **changes) == 2
    said = capsys.readouterr().err
    assert complaint in said
    assert len(said.splitlines()) == 1
    assert not list(tmp_path.glob("run/models"))


def test_an_attack_that_does_not_apply_under_a_defense_is_noted(start: Callable[..., int], tmp_path: Path) -> None:
    attacks = {"small": {"class_path": SMALL, "init_args": {"max_loss": 0.5}}}
    few = {"noise": CONTENT["starts"]["noise"]}
    options = {"seeds": {}, "membership": None, "starts": few, "training": {"steps": 60, "lr": 2.0}}
    assert start(tmp_path, attacks=attacks, **options) == 0
    found = TrainsetStudy.read(tmp_path)
    assert [group.key for group in found.groups] == ["small.noise_0.none"]
    [(cell, reason)] = found.refused.items()
    assert "stopped" in cell
    assert reason.startswith("the training loss must be at most 0.5")


def test_a_test_for_members_that_is_refused_leaves_the_attack_its_result(
    start: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model without an image may refuse the attack only when it has been trained, as by its loss."""

    def refuse(self: ModelTraining, folder: Path, examples: TrainingSet, index: int) -> Path:
        raise ThreatModelError("its loss is too large")

    monkeypatch.setattr(ModelTraining, "without", refuse)
    few = {"noise": CONTENT["starts"]["noise"]}
    assert start(tmp_path, starts=few, defenses={}, seeds={}, membership={"tested": 1}) == 0
    found = TrainsetStudy.read(tmp_path)
    assert found.refused == {}
    [cell] = [cell for group in found.groups for cell in group.cells]
    assert cell["claims"] == []
    [note] = cell["notes"]
    assert note.startswith("Not tested whether training image ")
    assert note.endswith(" shows, on a model without it: its loss is too large.")


def test_a_model_trained_elsewhere_is_attacked_as_it_is(start: Callable[..., int], study: Path, tmp_path: Path) -> None:
    [model] = (study / "models").glob("none-s0-*/model.safetensors")
    tensors = load_file(model)
    for part in ("weights", "start"):
        own = {name.removeprefix(f"{part}."): value for name, value in tensors.items() if name.startswith(part)}
        save_file(own, tmp_path / f"{part}.safetensors")
    examples = training_set(settings(), 0)
    save_file({"images": examples.images.float(), "labels": examples.labels}, tmp_path / "examples.safetensors")
    files = {name: str(tmp_path / f"{name}.safetensors") for name in ("weights", "examples", "start")}
    own = {"defenses": {}, "membership": None, "seeds": {}, "starts": {"noise": CONTENT["starts"]["noise"]}}
    assert start(tmp_path / "run", released=files, **own) == 0
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    original = json.loads((study / "metrics.json").read_text())
    loss = json.loads(next(study.glob("cells/small-noise_0-none-s0-*/results.json")).read_text())["model"]["loss"]
    assert metrics["training_loss.small.noise_0.none"] == pytest.approx(loss, rel=1e-6)
    assert metrics["n_images.small.noise_0.none"] == original["n_images.small.noise_0.none"]
    assert TrainsetStudy.read(tmp_path / "run").elsewhere
    save_file({"layers.1.weight": torch.zeros(2, 2)}, files["weights"])
    assert start(tmp_path / "other", released=files, **own) == 2
    assert start(tmp_path / "more", released=files, **{**own, "defenses": CONTENT["defenses"]}) == 2


def test_a_given_model_is_told_apart_by_what_its_files_hold(tmp_path: Path) -> None:
    def found(place: Path, **contents: str) -> str:
        place.mkdir(exist_ok=True)
        paths = {name: place / f"{name}.safetensors" for name in ("weights", "examples", "start")}
        for name, path in paths.items():
            path.write_text(contents.get(name, name))
        own: dict[str, Any] = dict.fromkeys(("data", "examples", "network", "dtype"))
        own |= {"known": {"images": 0}, "training": {}, "defenses": {}, "released": paths}
        [key] = released_models(settings(released=ReleasedFiles(**paths)), own)
        return key.digest

    first = found(tmp_path / "here")
    assert found(tmp_path / "there") == first
    assert len({first, *(found(tmp_path / "here", **{name: "new"}) for name in ("weights", "examples", "start"))}) == 4


def seen_of(own: TrainsetSettings) -> tuple[Any, ReleasedModel]:
    examples = training_set(own, 0)
    network = network_of(own, examples, 0)
    weights = {name: weight.detach() for name, weight in network.named_parameters()}
    return examples, ReleasedModel(network, weights, "binary", examples.image_shape, 2, examples.mean, 6)


def test_training_images_are_balanced_and_apart_from_the_others() -> None:
    examples = training_set(settings(), 0)
    assert examples.labels.tolist() == [0, 0, 0, 1, 1, 1]
    distances = torch.cdist(examples.images.flatten(1), examples.others.flatten(1))
    assert float(distances.min()) > 0
    assert not torch.equal(training_set(settings(), 1).images, examples.images)
    assert torch.equal(training_set(settings(), 0).images, examples.images)
    public = examples.public.double().mean(dim=0) / 255
    assert torch.allclose(examples.mean, public, atol=1e-6)
    kept, labels = examples.trained_on(2)
    assert torch.equal(kept, examples.images[[0, 1, 3, 4, 5]])
    assert labels.tolist() == [0, 0, 1, 1, 1]


@pytest.mark.parametrize("classes", [{3: 0, 7: 1}, None])
def test_training_images_have_their_positions_in_the_test_split(classes: dict[int, int] | None) -> None:
    task = "binary" if classes else "multiclass"
    examples = training_set(settings(examples=TrainingSetSettings(classes, 3), training=Training(task)), 0)
    _, test = Digits().load()
    assert torch.equal(test.pixels(examples.ids).to(examples.images), examples.images)
    numbers = list(classes or range(10))
    assert test.labels[examples.ids].tolist() == [numbers[label] for label in examples.labels.tolist()]


def test_starts_keep_labels_and_differ_between_restarts() -> None:
    own = settings(candidates=3)
    examples, seen = seen_of(own)
    first, again, second = (candidates_of(own, seen, examples, NoiseStart(), 0.0, 0, number) for number in (0, 0, 1))
    assert torch.equal(first.images, again.images)
    assert first.seed == again.seed != second.seed
    assert not torch.equal(first.images, second.images)
    truth = candidates_of(own, seen, examples, TruthStart(), 1.0, 0, 0)
    assert torch.equal(truth.images[6:12], examples.images)
    assert truth.labels.tolist() == 3 * examples.labels.tolist()
    others = candidates_of(own, seen, examples, OtherPartitionStart(), 0.0, 0, 0)
    known = {tuple(image.flatten().tolist()): int(i >= 3) for i, image in enumerate(examples.others)}
    assert [known[tuple(image.flatten().tolist())] for image in others.images] == others.labels.tolist()


@pytest.mark.parametrize("build", [lambda: SeedSettings(trainings=0), lambda: MembershipTest(tested=0)])
def test_numbers_must_be_positive(build: Callable[[], object]) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        build()


def test_knowledge_is_granted_or_not() -> None:
    from lit_recon.experiments.trainset.released import initial_weights
    from lit_recon.experiments.trainset.released import seen_of as see

    own = settings(known=KnownSettings(training=False, weight_decay=False, loss=False, start=True))
    examples = training_set(own, 0)
    network = network_of(own, examples, 0)
    weights = initial_weights(network)
    hidden = see(own, Training(weight_decay=0.1), examples, network, weights, weights, 0.5, 6)
    assert (hidden.training, hidden.weight_decay, hidden.loss) == (None, None, None)
    assert hidden.start is not None
    assert hidden.start.keys() == weights.keys()
    assert all(torch.equal(hidden.start[name], weights[name]) for name in weights)
    shown = see(settings(), Training(weight_decay=0.1), examples, network, weights, weights, 0.5, 6)
    assert (shown.weight_decay, shown.loss, shown.start) == (0.1, 0.5, None)


def test_a_mean_over_seeds_has_an_interval() -> None:
    assert SeedMean.of([0.5]).text() == "0.5"
    found = SeedMean.of([0.25, 0.75])
    assert found.value == 0.5
    assert found.half == pytest.approx(12.706 * 0.25, rel=1e-3)  # Student's t with one degree of freedom
