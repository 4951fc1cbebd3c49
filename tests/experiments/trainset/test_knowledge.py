"""What attackers know: known training images, certified images, and attacks that are refused for what they lack."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from lit_recon.attacks.trainset import RepeatedTraining, Stationarity, Training
from lit_recon.cli import attack
from lit_recon.data.sources import Digits
from lit_recon.data.splits import in_pool
from lit_recon.errors import ConfigError, ThreatModelError
from lit_recon.experiments.trainset.released import candidates_of, initial_weights, network_of, seen_of, training_set
from lit_recon.experiments.trainset.results import TrainsetStudy
from lit_recon.experiments.trainset.run import checked
from lit_recon.experiments.trainset.score import certified
from lit_recon.experiments.trainset.settings import KnownSettings, ReleasedFiles, TrainingSetSettings, TrainsetSettings
from lit_recon.experiments.trainset.starts import NoiseStart
from lit_recon.models.centered import CenteredResNet18

STARTS = "lit_recon.experiments.trainset.starts"
MLP = "lit_recon.models.centered.CenteredMLP"
CONTENT: dict[str, Any] = {
    "name": "known",
    "data": {"class_path": "Digits"},
    "examples": {"classes": {0: 0, 1: 1}, "per_class": 4, "n_public": 60},
    "network": {"class_path": MLP, "init_args": {"hidden": [60], "initial_std": None}},
    "training": {"steps": 10, "lr": 0.2},
    "known": {"start": True, "images": 6},
    "candidates": 1,
    "attacks": {"repeated": {"class_path": "RepeatedTraining", "init_args": {"steps": 50, "certain": 0.2}}},
    "starts": {"noise": {"class_path": f"{STARTS}.NoiseStart", "init_args": {"scale": 0.1}}},
    "threads": 1,
    "wandb": {"mode": "disabled"},
}
#: All training images unknown, attacked by the neurons that they leave inactive.
INACTIVE: dict[str, Any] = {
    "network": {"class_path": MLP, "init_args": {"hidden": [200], "initial_std": None}},
    "known": {"start": True, "training": False, "loss": False},
    "attacks": {"inactive": {"class_path": "InactiveNeurons", "init_args": {"steps": 200}}},
    "starts": {"other": {"class_path": f"{STARTS}.OtherPartitionStart"}},
}
KKT = {"attacks": {"kkt": {"class_path": "MarginKKT", "init_args": {"steps": 2}}}}


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., int]:
    """The command on the content with changes; its run folder is `run` below the test's."""

    def run(**changes: Any) -> int:
        config = tmp_path / "known.yaml"
        config.write_text(yaml.safe_dump({**CONTENT, **changes}, sort_keys=False))
        return attack(["trainset", "--config", str(config), "--out", str(tmp_path / "run")])

    return run


def settings(n_known: int) -> TrainsetSettings:
    return TrainsetSettings(
        data=Digits(),
        examples=TrainingSetSettings({0: 0, 1: 1}, 4, n_public=60),
        known=KnownSettings(start=True, images=n_known),
        attacks={"repeated": RepeatedTraining()},
        starts={"noise": NoiseStart()},
        candidates=1,
    )


def rows(images: torch.Tensor) -> set[tuple[float, ...]]:
    return {tuple(image.flatten().tolist()) for image in images}


def test_known_images_are_part_of_the_training_and_not_of_what_is_sought() -> None:
    own, every = training_set(settings(5), 0), training_set(settings(0), 0)
    assert (len(own.images), len(own.known_images), own.n_examples) == (3, 5, 8)
    assert rows(own.images) | rows(own.known_images) == rows(every.images)
    assert not rows(own.images) & rows(own.known_images)
    images, labels = own.trained_on(1)
    assert torch.equal(images, torch.cat([own.known_images, own.images[[0, 2]]]))
    assert torch.equal(labels, torch.cat([own.known_labels, own.labels[[0, 2]]]))
    labels_of_others = dict(zip(map(tuple, every.others.flatten(1).tolist()), every.labels.tolist(), strict=True))
    assert [labels_of_others[tuple(row)] for row in own.others.flatten(1).tolist()] == own.labels.tolist()


def test_the_attacker_sees_the_known_images_and_a_candidate_for_each_of_the_others() -> None:
    for n_known in (5, 0):
        own = settings(n_known)
        examples = training_set(own, 0)
        network = network_of(own, examples, 0)
        weights = initial_weights(network)
        seen = seen_of(own, Training(), examples, network, weights, weights, 0.5, examples.n_examples)
        assert seen.n_examples == 8
        assert (seen.known_images is None) == (n_known == 0)
        assert len(candidates_of(own, seen, examples, NoiseStart(), 0.0, 0, 0).labels) == 8 - n_known
    assert seen.known_labels is None


def test_a_start_that_nobody_gave_is_not_granted() -> None:
    files = ReleasedFiles(weights=Path("weights"), examples=Path("examples"))
    with pytest.raises(ConfigError, match=r"give their file as released.start, or leave out known.start"):
        replace(settings(6), released=files)
    replace(settings(6), released=replace(files, start=Path("start")))
    replace(settings(6), released=files, known=KnownSettings())


def test_all_training_images_cannot_be_known() -> None:
    with pytest.raises(ConfigError, match=r"known.images=8 leaves none of the 8"):
        training_set(settings(8), 0)
    with pytest.raises(ConfigError, match="at least 0"):
        KnownSettings(images=-1)


def test_certified_candidates_are_right_within_0_05() -> None:
    truth = torch.zeros(3, 1, 2, 2)
    truth[1], truth[2] = 0.4, 0.8
    candidates = torch.cat([truth[:2] + 0.04, truth[1:2], truth[2:] + 0.06, torch.full((1, 1, 2, 2), 0.2)])
    found = certified(candidates, truth, torch.zeros(0, 1, 2, 2))
    assert found == {"candidates": 5, "wrong": 2, "images": 2}
    known = torch.full((1, 1, 2, 2), 0.2)
    assert certified(candidates, truth, known) == {"candidates": 5, "wrong": 1, "images": 2}
    assert certified(candidates[:0], truth, known) == {"candidates": 0, "wrong": 0, "images": 0}


def test_unknown_images_are_found_by_repeated_training_and_the_page_says_what_was_known(
    start: Callable[..., int], tmp_path: Path, capsys: Any
) -> None:
    assert start() == 0
    said = capsys.readouterr().out
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["n_images.repeated.noise_0.none"] == 2
    assert metrics["rmse.repeated.noise_0.none"] < 0.05  # 0.007
    assert metrics["certified.repeated.noise_0.none"] == 2
    assert metrics["certified_wrong.repeated.noise_0.none"] == 0
    assert "certified by the attack: 2 of 2 training images, 0 wrong" in said
    page = (tmp_path / "run" / "report.html").read_text()
    assert "6 of the training images; the others are to be found" in page
    assert "repeated is RepeatedTraining" in page
    assert "Certified, wrong" in page
    assert "TableCell" not in page


def test_inactive_neurons_certify_all_images(start: Callable[..., int], tmp_path: Path) -> None:
    assert start(**INACTIVE) == 0
    found = TrainsetStudy.read(tmp_path / "run")
    [group] = found.groups
    sure = group.certified()
    assert sure is not None
    assert {name: mean.value for name, mean in sure.items()} == {"images": 8, "candidates": 8, "wrong": 0}
    assert group.mean("scores", "rmse").value < 1e-6  # 1e-14


def test_members_are_not_tested_where_leaving_one_out_splits_the_others_anew(
    start: Callable[..., int], tmp_path: Path
) -> None:
    small = {"small": {"class_path": "tests.experiments.trainset.attack.SmallAttack"}}
    options = {"known": {}, "attacks": small, "membership": {"tested": 1}, "defenses": {"split": {"parts": 2}}}
    assert start(**options) == 0
    plain, split = (cell for group in TrainsetStudy.read(tmp_path / "run").groups for cell in group.cells)
    assert len(plain["claims"]) == 2
    assert split["claims"] == []
    [note] = split["notes"]
    assert note == (
        "Not tested whether training images show: without one of them, those of a training in 2 parts would be in "
        "other parts."
    )


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({**INACTIVE, "known": {}}, "attacks.inactive, starts.other: the change of the first layer needs the weights"),
        ({"known": {"images": 6}}, "attacks.repeated, starts.noise: RepeatedTraining needs the initial weights"),
        ({"known": {"start": True, "training": False}}, "RepeatedTraining needs the training of the released model"),
        ({"candidates": 2}, "6 known and 4 candidates of 8; give 2 candidates"),
        ({"known": {"start": True, "images": 8}}, "lower known.images"),
        ({"known": {"images": 0}, "attacks": {"own": {"class_path": "KnownStart"}}}, "give them (`start`)"),
        (
            {"known": {"training": False, "weight_decay": False}, "attacks": {"own": {"class_path": "Stationarity"}}},
            "here it is unknown, and all images far from the decision boundary are solutions: give the weight decay",
        ),
        (
            {"defenses": {"split": {"parts": 9}}},
            "defenses.split: 8 images cannot be split into 9 parts: take fewer parts",
        ),
        (
            {"known": {}, "membership": {"tested": 1}, "defenses": {"split": {"parts": 8}}},
            "defenses.split, for membership without one training image: 7 images cannot be split into 8 parts",
        ),
        ({"known": {"weight_decay": False}}, "known.weight_decay false hides a part of the training procedure"),
        ({"known": {"loss": False}, **KKT}, "the loss of this model is unknown"),
        ({"known": {}, **KKT, "training": {"until": 0.5}}, "the loss of this model is 0.5, and at most max_loss=0.01"),
        (
            {"known": {}, **KKT, "network": {"class_path": "tests.experiments.trainset.attack.Biased"}},
            "the condition of stationarity holds for homogeneous networks",
        ),
    ],
)
def test_an_attack_that_lacks_something_is_refused_before_any_training(
    start: Callable[..., int], tmp_path: Path, capsys: Any, changes: dict[str, Any], complaint: str
) -> None:
    assert start(**changes) == 2
    said = capsys.readouterr().err
    assert complaint in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "run" / "models").exists()


def test_a_training_that_ends_far_from_zero_loss_is_not_attacked(start: Callable[..., int], capsys: Any) -> None:
    assert start(known={}, **KKT, training={"steps": 3, "lr": 0.01, "until": 0.001}) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: no attack applies to its model: the condition of the largest margin holds")
    assert "taken as almost zero: attack a model that was trained further" in said
    assert len(said.splitlines()) == 1


def test_an_attack_that_applies_under_a_defense_only_has_its_page(start: Callable[..., int], tmp_path: Path) -> None:
    network = {"class_path": MLP, "init_args": {"hidden": [20]}}
    training, defenses = {"steps": 30, "lr": 0.1}, {"decay": {"weight_decay": 0.01}}
    assert start(**KKT, known={"training": True}, network=network, training=training, defenses=defenses) == 0
    page = (tmp_path / "run" / "report.html").read_text()
    assert "kkt from noise, decay" in page
    assert "the loss of this model is" in page  # of the training without the defense
    assert "How much of a reconstruction is its start" not in page


def test_an_attack_that_only_a_defense_lets_apply_is_no_reason_to_stop() -> None:
    own = replace(settings(6), attacks={"own": Stationarity()}, known=KnownSettings())
    plain = {"none": Training(steps=2, lr=0.1)}
    with pytest.raises(ThreatModelError, match=r"attacks.own, starts.noise: .* here it is 0"):
        checked(own, plain)
    checked(own, plain | {"decay": Training(steps=2, lr=0.1, weight_decay=0.01)})


@pytest.mark.parametrize(
    ("part", "name", "value", "complaint"),
    [
        ("weights", "layers.9.weight", torch.zeros(2, 2), "must have the parameters of the network CenteredMLP"),
        ("weights", "layers.1.weight", torch.zeros(60, 63), "layers.1.weight must be (60, 64) in this network"),
        ("start", "layers.1.weight", torch.zeros(60, 63), "the start: layers.1.weight must be (60, 64)"),
        ("start", "layers.1.bias", torch.full((60,), torch.nan), "the start: layers.1.bias holds NaN"),
    ],
)
def test_files_of_another_network_are_refused_in_one_line(
    start: Callable[..., int], tmp_path: Path, capsys: Any, part: str, name: str, value: torch.Tensor, complaint: str
) -> None:
    own = settings(6)
    examples = training_set(own, 0)
    weights = {
        "layers.1.weight": torch.randn(60, 64),
        "layers.1.bias": torch.zeros(60),
        "layers.3.weight": torch.ones(1, 60),
    }
    files = {which: tmp_path / f"{which}.safetensors" for which in ("weights", "start", "examples")}
    save_file(weights, files["weights"])
    save_file(weights, files["start"])
    images, labels = examples.trained_on()
    save_file({"images": images.float(), "labels": labels}, files["examples"])
    save_file({**load_file(files[part]), name: value}, files[part])
    assert start(released={which: str(path) for which, path in files.items()}) == 2
    said = capsys.readouterr().err
    assert complaint in said
    assert len(said.splitlines()) == 1


def test_a_residual_network_is_homogeneous() -> None:
    torch.manual_seed(0)
    network = CenteredResNet18((3, 16, 16), width=2).double()
    images = torch.rand(4, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    before = network(images)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(3.0)
        network.mean.zero_()
    assert before.shape == (4, 1)
    assert torch.allclose(network(images), 9 * before, rtol=1e-3, atol=1e-5)


def test_training_images_of_a_model_from_elsewhere_are_no_public_ones(tmp_path: Path) -> None:
    """Here it was trained on images of the training split, and of the pool that others are drawn from."""
    own = settings(0)
    public, test = own.data.load()
    pool = test.subset(in_pool(test, own.examples.pool))
    first = [torch.nonzero(part.labels == label).flatten()[:2] for part in (public, pool) for label in (0, 1)]
    theirs = [part.subset(chosen) for part, chosen in zip((public, public, pool, pool), first, strict=True)]
    images, labels = torch.cat([part.pixels() for part in theirs]), torch.cat([part.labels for part in theirs])
    save_file({"images": images, "labels": labels}, tmp_path / "examples.safetensors")
    released = ReleasedFiles(*(tmp_path / f"{name}.safetensors" for name in ("weights", "examples", "start")))
    examples = training_set(replace(own, released=released), 0)
    assert examples.left_out == 8
    found = {image.tobytes() for image in (255 * images).round().to(torch.uint8).numpy()}
    assert found.isdisjoint(image.tobytes() for image in examples.public.numpy())
    assert found.isdisjoint(image.tobytes() for image in (255 * examples.others).round().to(torch.uint8).cpu().numpy())


def test_training_images_of_the_other_pool_are_counted_too(tmp_path: Path) -> None:
    """Two images are of the pool that the study draws from, two of the other one."""
    own = settings(0)
    _, test = own.data.load()
    pools = [test.subset(in_pool(test, pool)) for pool in ("evaluation", "development")]
    theirs = [pool.subset(torch.stack([(pool.labels == label).nonzero()[0, 0] for label in (0, 1)])) for pool in pools]
    images, labels = torch.cat([part.pixels() for part in theirs]), torch.cat([part.labels for part in theirs])
    save_file({"images": images, "labels": labels}, tmp_path / "examples.safetensors")
    released = ReleasedFiles(*(tmp_path / f"{name}.safetensors" for name in ("weights", "examples", "start")))
    assert training_set(replace(own, released=released), 0).left_out == 4
