"""A grid's configuration and the runs that it stands for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lit_recon.attacks.updates import GenerativePrior, GradientMatching
from lit_recon.errors import ConfigError, MissingDataError
from lit_recon.experiments.engine.pieces import merged
from lit_recon.experiments.evaluate.grid import GridCell, build_cells, network_in_words, part_of
from lit_recon.experiments.evaluate.run import _description
from lit_recon.experiments.evaluate.settings import DefenseFamily, EvaluateSettings, GridAttack, GridPaper
from lit_recon.experiments.settings import LpipsSettings, ModelSettings
from lit_recon.models.generative.generator import ConvGenerator, GeneratorCheckpoint, save_generator
from lit_recon.modules.generator import GENERATOR_FILE

COMMON: dict[str, Any] = {
    "data": {"class_path": "Digits"},
    "backbone": {"checkpoint": None, "cache": "runs/backbones", "epochs": 1, "lr": 0.1},
    "client": {"batch_norm": "eval", "local_steps": None, "n_clients": 1},
    "victims": {"n": 4, "batch_size": 1},
    "trainer": {"devices": 1},
    "lpips": {"network": "none"},
    "seed": 3,
    "knowledge": None,
}
FILE: dict[str, Any] = {
    "name": "some",
    "data": {"class_path": "CIFAR10", "init_args": {"root": "data"}},
    "victims": {"n": 50},
    "knowledge": {"labels": True},
    "attack": {"class_path": "GradientMatching", "init_args": {"steps": 100, "restarts": 2}},
    "paper": {"citation": "the attack's own"},
}


@pytest.fixture
def attack(tmp_path: Path) -> GridAttack:
    path = tmp_path / "some.yaml"
    path.write_text(yaml.safe_dump(FILE))
    return GridAttack(path, {"attack": {"init_args": {"steps": 7}}})


def grid(attack: GridAttack, **settings: Any) -> list[GridCell]:
    noise = DefenseFamily({"defense": {"class_path": "GaussianNoise"}}, "defense.init_args.std", [0.01, 0.1])
    local = DefenseFamily({}, "client.local_steps.steps", [3.0])
    whole = {"attacks": {"some": attack}, "defenses": {"noise": noise, "local": local}, **settings}
    return build_cells(EvaluateSettings(**whole), COMMON)


def test_every_defense_meets_every_attack_at_every_batch_size(attack: GridAttack) -> None:
    cells = grid(attack, batch_sizes=[1, 4])
    attacked = [cell for cell in cells if cell.kind == "attack"]
    assert len(attacked) == 4 * 2
    assert len(cells) - len(attacked) == 4
    assert len({cell.folder for cell in cells}) == len(cells)
    assert [cell.kind for cell in cells[:4]] == ["utility"] * 4


def test_a_cell_has_the_grids_data_and_the_attacks_attack(attack: GridAttack) -> None:
    cell = next(c for c in grid(attack, batch_sizes=[4]) if c.kind == "attack" and c.strength == 0.1)
    assert cell.settings["data"] == {"class_path": "Digits"}
    assert cell.settings["victims"] == {"n": 4, "batch_size": 4}
    assert cell.settings["attack"]["init_args"] == {"steps": 7, "restarts": 2}
    assert cell.settings["defense"] == {"class_path": "GaussianNoise", "init_args": {"std": 0.1}}
    assert cell.settings["knowledge"] == {"labels": True, "defense": True}
    assert cell.settings["seed"] == 3
    assert "paper" not in cell.settings
    assert "name" not in cell.settings


@pytest.mark.parametrize(
    "other",
    [
        {"victims": {"n": 2}},
        {"victims": {"seed": 5}},
        {"data": {"class_path": "MNIST"}},
        {"client": {"n_clients": 2}},
        {"seed": 4},
    ],
)
def test_attacks_that_are_compared_are_on_the_same_images_and_updates(
    attack: GridAttack, other: dict[str, Any]
) -> None:
    (key,) = other
    with pytest.raises(ConfigError, match=rf"attacks\.some\.settings must leave data, .* got another {key}: set"):
        grid(GridAttack(attack.config, {**attack.settings, **other}))
    unranked = GridAttack(attack.config, {**attack.settings, **other, "backbone": {"epochs": 2}})
    assert len(grid(unranked)) == len(grid(attack))


def test_an_attack_may_repeat_what_the_grid_has(attack: GridAttack) -> None:
    again = {"victims": {"n": 4}, "seed": 3}
    assert [cell.folder for cell in grid(GridAttack(attack.config, {**attack.settings, **again}))] == [
        cell.folder for cell in grid(attack)
    ]


def test_a_defense_of_the_attacks_own_is_behind_no_cell(attack: GridAttack) -> None:
    """Such as of the configuration that a run left: it would count as no defense, and its arguments as the grid's."""
    before = [cell.folder for cell in grid(attack)]
    own = {"class_path": "GaussianNoise", "init_args": {"relative": True}}
    attack.config.write_text(yaml.safe_dump({**FILE, "defense": own}))
    assert [cell.folder for cell in grid(attack)] == before
    with pytest.raises(ConfigError, match=r"attacks\.some\.settings must not have a defense"):
        grid(GridAttack(attack.config, {"defense": own}))


def test_local_steps_are_a_defense_of_the_client(attack: GridAttack) -> None:
    cell = next(c for c in grid(attack) if c.kind == "attack" and c.defense == "local")
    assert cell.settings["client"] == {"batch_norm": "eval", "local_steps": {"steps": 3}, "n_clients": 1}
    assert "defense" not in cell.settings


def test_attackers_who_do_not_know_the_defense_stand_beside_those_who_do(attack: GridAttack) -> None:
    cells = [cell for cell in grid(attack, aware="both") if cell.kind == "attack"]
    assert [(cell.defense, cell.aware) for cell in cells] == [
        ("none", None),
        ("noise", True),
        ("noise", False),
        ("noise", True),
        ("noise", False),
        ("local", True),
        ("local", False),
    ]
    assert [cell.settings["knowledge"]["defense"] for cell in cells] == [False, True, False, True, False, True, False]


def test_trainings_have_the_backbones_settings_but_for_their_own(attack: GridAttack) -> None:
    cell = next(c for c in grid(attack, utility={"epochs": 20}) if c.kind == "utility" and c.strength == 0.01)
    assert cell.settings["epochs"] == 20
    assert cell.settings["lr"] == 0.1
    assert cell.settings["defense"]["init_args"] == {"std": 0.01}
    assert not {"checkpoint", "cache", "victims", "client", "backbone"} & cell.settings.keys()


def test_a_defense_may_need_another_network_in_training_but_not_under_attack(attack: GridAttack) -> None:
    """DP-SGD cannot be trained with BatchNorm: its trainings alone have another norm, at the grid's epochs."""
    needs = {"trunk": {"class_path": "ResNet18", "init_args": {"norm": "group"}}}
    private = DefenseFamily({"defense": {"class_path": "DPSGD"}}, "defense.init_args.bound", [1.0], utility=needs)
    settings = EvaluateSettings(attacks={"some": attack}, defenses={"private": private}, utility={"epochs": 20})
    cells = build_cells(settings, COMMON)
    told = _description(settings, cells, COMMON)["trainings"]
    assert told == {"private": "trunk.class_path ResNet18, trunk.init_args.norm group"}
    plain, own = (cell for cell in cells if cell.kind == "utility")
    assert (plain.settings["epochs"], own.settings["epochs"]) == (20, 20)
    assert "trunk" not in plain.settings
    assert own.settings["trunk"] == needs["trunk"]
    assert all("trunk" not in cell.settings["backbone"] for cell in cells if cell.kind == "attack")


@pytest.mark.parametrize(("norm", "told"), [("batch", ["informed"]), ("group", [])])
def test_the_page_is_told_which_attacks_know_batch_statistics(attack: GridAttack, norm: str, told: list[str]) -> None:
    """A network without BatchNorm layers has no such statistics."""
    informed = GridAttack(attack.config, {**attack.settings, "knowledge": {"batch_norm": "batch"}})
    settings = EvaluateSettings(attacks={"some": attack, "informed": informed}, defenses={})
    trunk = {"class_path": "ConvNet", "init_args": {"norm": norm}}
    own = {**COMMON, "backbone": {**COMMON["backbone"], "trunk": trunk}}
    assert _description(settings, build_cells(settings, own), own)["batch_statistics"] == told


def test_the_ends_of_a_defense_are_trained_several_times(attack: GridAttack) -> None:
    """Three strengths and three repetitions: the one between is trained once; each repetition has its own seed."""
    noise = DefenseFamily({"defense": {"class_path": "GaussianNoise"}}, "defense.init_args.std", [0.01, 0.1, 1.0])
    paper = GridPaper(losses={"noise": [0.4, "0.5 to 0.6", 1.9]})
    cells = grid(attack, defenses={"noise": noise}, utility_seeds=3, paper=paper)
    trained = [cell for cell in cells if cell.kind == "utility"]
    assert [(cell.strength, cell.repetition) for cell in trained] == [
        *((strength, 0) for strength in (None, 0.01, 0.1, 1.0)),
        *((strength, number) for number in (1, 2) for strength in (None, 0.01, 1.0)),
    ]
    assert [cell.settings["seed"] for cell in trained] == [3 + cell.repetition for cell in trained]
    assert len({cell.folder for cell in trained}) == len(trained)
    assert trained[-1].describe() == "training under noise 1, repetition 2"
    assert [cell.paper for cell in trained[:4]] == [None, 0.4, "0.5 to 0.6", 1.9]
    alone = [cell.folder for cell in grid(attack, defenses={"noise": noise}) if cell.kind == "utility"]
    assert alone == [cell.folder for cell in trained[:4]]  # more repetitions leave the first as it is


def test_parts_of_a_grid_are_its_cells(attack: GridAttack) -> None:
    whole = {cell.folder for cell in grid(attack)}
    for names in (["none", "noise", "local"], ["none", "noise_0.01", "noise_0.1", "local"]):
        parts = [{cell.folder for cell in part_of(grid(attack), [name])} for name in names]
        assert set.union(*parts) == whole
        assert sum(map(len, parts)) == len(whole)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"only": ["pruning"]},
            "only must name some of none, .*noise_0.1, local_3; got pruning",
        ),
        ({"without": ["other"]}, "without must name some of some; got other"),
        ({"without": ["some"]}, "without must leave some of the attacks some; got all of them"),
        ({"utility_seeds": 0}, "utility_seeds must be"),
        ({"paper": GridPaper(losses={"noise": [0.4]})}, "paper.losses.noise must name a defense"),
        ({"paper": GridPaper(losses={"pruning": [0.4]})}, "paper.losses.pruning must name a defense"),
    ],
)
def test_parts_and_repetitions_that_do_not_exist_are_refused(
    attack: GridAttack, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        grid(attack, **settings)


def test_strengths_that_are_close_have_words_of_their_own(attack: GridAttack) -> None:
    close = [0.1234567, 0.1234568, 1e6, 1000001.0]
    noise = DefenseFamily({"defense": {"class_path": "GaussianNoise"}}, "defense.init_args.std", close)
    cells = grid(attack, defenses={"noise": noise})
    attacked = [cell.describe() for cell in cells if cell.kind == "attack" and cell.strength is not None]
    assert attacked == [f"noise {value}, some, batch 1" for value in ("0.1234567", "0.1234568", "1e+06", "1000001")]
    only = ["noise_0.1234568"]
    assert EvaluateSettings(attacks={"some": attack}, defenses={"noise": noise}, only=only).only == only
    assert {cell.strength for cell in part_of(cells, only)} == {0.1234568}


def test_utility_can_be_left_out(attack: GridAttack) -> None:
    assert all(cell.kind == "attack" for cell in grid(attack, utility=None))


def test_a_changed_setting_is_another_cell_and_another_device_is_not(attack: GridAttack) -> None:
    folders = [cell.folder for cell in grid(attack)]
    assert [cell.folder for cell in grid(attack)] == folders
    longer = GridAttack(attack.config, {"attack": {"init_args": {"steps": 8}}})
    assert not set(folders) & {cell.folder for cell in grid(longer) if cell.kind == "attack"}
    elsewhere = {**COMMON, "trainer": {"devices": 1, "threads": 1}}
    settings = EvaluateSettings(attacks={"some": attack}, defenses={})
    first, second = ([c.folder for c in build_cells(settings, own)] for own in (COMMON, elsewhere))
    assert first == second


def test_another_content_of_a_file_makes_other_cells(attack: GridAttack, tmp_path: Path) -> None:
    data, weights = tmp_path / "data.npz", tmp_path / "weights.pt"
    own: dict[str, Any] = {**COMMON, "data": {"class_path": "Npz", "init_args": {"root": str(data)}}}
    own["model"] = {"class_path": "torch.nn.Linear", "weights": str(weights)}
    model = ModelSettings("torch.nn.Linear", weights=weights)
    of_images = EvaluateSettings(attacks={"some": attack}, defenses={})
    of_weights = EvaluateSettings(attacks={"some": attack}, defenses={}, model=model, utility=None)

    def folders(settings: EvaluateSettings) -> set[str]:
        return {cell.folder for cell in build_cells(settings, own)}

    data.write_bytes(b"images")
    weights.write_bytes(b"weights")
    first = [folders(settings) for settings in (of_images, of_weights)]
    assert [folders(settings) for settings in (of_images, of_weights)] == first
    data.write_bytes(b"other images")
    assert not folders(of_images) & first[0]
    data.write_bytes(b"images")
    weights.write_bytes(b"other weights")
    assert folders(of_images) == first[0]
    assert not folders(of_weights) & first[1]


def test_printed_figures_reach_their_cells(attack: GridAttack) -> None:
    paper = GridPaper("Some", {"some": {"noise": [0.17, "0.2 to 0.3"]}}, "elsewhere")
    cells = {(c.defense, c.strength): c for c in grid(attack, paper=paper) if c.kind == "attack"}
    assert cells["noise", 0.1].paper == "0.2 to 0.3"
    assert cells["noise", 0.01].settings["paper"]["values"] == {"rmse": 0.17}
    assert cells["none", None].settings["paper"]["values"] == {}


def test_printed_figures_may_differ_by_batch_size_and_stand_without_a_defense(attack: GridAttack) -> None:
    figures: dict[str, Any] = {"some": {"none": {1: [0.4], 8: [0.5]}, "noise": {8: [0.1, 0.2]}}}
    cells = grid(attack, paper=GridPaper("Some", figures), batch_sizes=[1, 8], metric="feature_error")
    found = {(c.defense, c.strength, c.batch_size): c for c in cells if c.kind == "attack"}
    assert [found["none", None, size].paper for size in (1, 8)] == [0.4, 0.5]
    assert [found["noise", 0.1, size].paper for size in (1, 8)] == [None, 0.2]
    assert found["none", None, 1].settings["paper"]["values"] == {"feature_error": 0.4}


@pytest.fixture
def drawing(tmp_path: Path, attack: GridAttack) -> GridAttack:
    """The attack with a generator that has to be trained."""
    path = tmp_path / "drawer.yaml"
    path.write_text(yaml.safe_dump({"name": "drawer", "data": {"class_path": "CIFAR10"}, "epochs": 2, "seed": 9}))
    return GridAttack(attack.config, attack.settings, generator=path)


def test_a_generator_is_trained_once_on_the_grids_data(attack: GridAttack, drawing: GridAttack) -> None:
    cells = grid(attack, attacks={"plain": attack, "drawing": drawing, "again": drawing})
    first, *others = cells
    assert (first.kind, first.defense, first.strength) == ("generator", "none", None)
    assert all(cell.kind != "generator" for cell in others)
    assert first.settings == {
        "data": {"class_path": "Digits"},
        "epochs": 2,
        "seed": 9,
        "trainer": {"devices": 1},
        "wandb": {"mode": "disabled"},
    }
    assert first.describe() == "generator drawer"
    assert {cell.attack for cell in cells if cell.generator == first.folder} == {"drawing", "again"}


def test_another_generator_makes_other_cells(attack: GridAttack, drawing: GridAttack) -> None:
    assert drawing.generator is not None
    before = grid(drawing)
    drawing.generator.write_text(yaml.safe_dump({"epochs": 3}))
    after = grid(drawing)
    for kind, kept in (("generator", False), ("utility", True), ("attack", False)):
        folders = ({cell.folder for cell in cells if cell.kind == kind} for cells in (before, after))
        assert (len(set.intersection(*folders)) > 0) == kept


def test_an_attack_draws_from_the_generator_of_its_grid(drawing: GridAttack, tmp_path: Path) -> None:
    cells = {cell.kind: cell for cell in grid(drawing, defenses={}, utility=None)}
    trained, other = tmp_path / cells["generator"].folder / GENERATOR_FILE, tmp_path / "stand_in.safetensors"
    prior = {"class_path": "GenerativePrior", "init_args": {"checkpoint": "nowhere.safetensors"}}
    settings = {"attack": {"class_path": "GradientMatching", "init_args": {"parametrization": prior, "steps": 1}}}
    cell = replace(cells["attack"], settings=settings)
    made = GeneratorCheckpoint(ConvGenerator((1, 8, 8), 2, 1), "digits", "", torch.zeros(0, dtype=torch.int64), 1)
    for path in (trained, other):
        save_generator(path, made)
    for given, expected in ((None, trained), (other, other)):
        attack = cell.built(tmp_path, given)["attack"]
        assert isinstance(attack, GradientMatching)
        assert isinstance(attack.parametrization, GenerativePrior)
        assert attack.parametrization.checkpoint == expected
    assert cell.piece(tmp_path, "rmse").needs == (cells["generator"].folder,)


def test_attacks_on_one_backbone_do_not_wait_for_each_other(attack: GridAttack) -> None:
    """Whichever begins first trains it, see `VictimModel.trained`."""
    pieces = [cell.piece(Path("here"), "rmse") for cell in grid(attack, batch_sizes=[1, 4])]
    assert not any(piece.shares for piece in pieces)


@pytest.mark.parametrize(
    ("backbone", "words"),
    [
        ({"checkpoint": None, "trunk": None}, "its own ResNet18"),
        ({"trunk": {"class_path": "a.MLP", "init_args": {"hidden": [4]}}}, "its own MLP(hidden=[4])"),
        (
            {"trunk": {"class_path": "ConvNet"}, "feature_layer": {"class_path": "b.Wide", "init_args": {"m": 8}}},
            "its own ConvNet() with Wide(m=8)",
        ),
        ({"checkpoint": "mine.safetensors", "trunk": None}, "its own mine.safetensors"),
    ],
)
def test_a_network_is_told_in_words(backbone: dict[str, Any], words: str) -> None:
    assert network_in_words(backbone) == words


def test_another_class_takes_no_arguments_of_the_first() -> None:
    below = {"attack": {"class_path": "A", "init_args": {"steps": 3}}, "seed": 0}
    assert merged(below, {"attack": {"class_path": "B"}}) == {"attack": {"class_path": "B"}, "seed": 0}
    assert merged(below, {"attack": {"init_args": {"x": 1}}})["attack"]["init_args"] == {"steps": 3, "x": 1}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batch_sizes": []}, "batch_sizes"),
        ({"batch_sizes": [2, 2]}, "batch_sizes"),
        ({"max_accuracy_drops": [5.0]}, "max_accuracy_drops"),
        ({"attacks": {}}, "at least one attack"),
        ({"paper": GridPaper(values={"some": {"noise": [0.1]}})}, "one entry per strength"),
        ({"paper": GridPaper(values={"some": {"none": [0.1, 0.2]}})}, "one entry per strength"),
        ({"paper": GridPaper(values={"other": {"noise": [0.1, 0.2]}})}, "must name an attack"),
        ({"paper": GridPaper(values={"some": {"noises": [0.1, 0.2]}})}, "must name an attack"),
        ({"paper": GridPaper(values={"some": {"noise": {2: [0.1, 0.2]}}})}, "batch sizes of this grid"),
        ({"metric": "lpips", "lpips": LpipsSettings("none")}, "name a network"),
        ({"defenses": {"none": DefenseFamily({}, "defense.std", [1.0])}}, "always part of the grid"),
    ],
)
def test_grids_that_make_no_sense_are_refused(attack: GridAttack, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        grid(attack, **change)


def test_a_missing_attack_file_is_named() -> None:
    with pytest.raises(MissingDataError, match=r"nowhere\.yaml"):
        grid(GridAttack(Path("nowhere.yaml")))


@pytest.mark.parametrize(
    ("settings", "strength", "values", "words"),
    [
        ({}, "defense.std", [], "at least one value"),
        ({}, "defense.std", [1.0, 1.0], "differ"),
        ({}, "defense.std", [float("nan")], "finite"),
        ({"attack": {}}, "defense.std", [1.0], "got attack"),
        ({}, "victims.n", [1.0], "got victims"),
    ],
)
def test_families_that_make_no_sense_are_refused(
    settings: dict[str, Any], strength: str, values: list[float], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        DefenseFamily(settings, strength, values)
