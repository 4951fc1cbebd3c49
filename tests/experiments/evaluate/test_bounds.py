"""The bounds of an evaluation's cells on its page, in its table and in its record."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lit_recon.attacks.updates import GradientMatching
from lit_recon.bounds import (
    GaussianPrior,
)
from lit_recon.defenses import (
    GaussianNoise,
)
from lit_recon.errors import ConfigError, TimeLimitError
from lit_recon.experiments.evaluate import bounds as command
from lit_recon.experiments.evaluate.bounds import noise_bounds, write_bounds
from lit_recon.experiments.evaluate.grid import GridCell
from lit_recon.experiments.evaluate.page import bound_panels, build_evaluation
from lit_recon.experiments.evaluate.results import Evaluation
from lit_recon.experiments.settings import BoundSettings, VictimSettings
from lit_recon.experiments.update_attack import bound
from lit_recon.models import MLP, Backbone
from lit_recon.reporting.run_folder import RunFolder
from tests.experiments.evaluate.conftest import ONE_CHANNEL, WHY


@pytest.mark.parametrize("std", [0.1, 3.0])
def test_the_information_is_weighted_by_the_inverse_variance_of_the_noise(std: float) -> None:
    squares = [torch.diag(torch.tensor(values, dtype=torch.float64)) for values in ([1.0, 4.0], [2.0, 2.0])]
    found = noise_bounds(squares, std, GaussianPrior.isotropic(2, 0.5))
    # a pixel's mean squared error is std^2 (1 + 1/4) / 2 in the first batch and std^2 / 2 in the second
    assert found["unbiased_rmse"] == pytest.approx(std * math.sqrt((0.625 + 0.5) / 2), rel=1e-9)
    every = (1 / (1.5 / std**2 + 2) + 1 / (3 / std**2 + 2)) / 2
    assert found["rmse"] == pytest.approx(math.sqrt(every), rel=1e-9)


def test_the_noise_of_each_cell_is_its_own(bounded: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """All share one Jacobian; noise before averaging over 4 images is halved by it."""
    counted: list[int] = []

    def squares(*_: object) -> list[torch.Tensor]:
        counted.append(1)
        return [torch.eye(2, dtype=torch.float64)]

    public = SimpleNamespace(pixels=lambda: torch.rand(9, 1, 1, 2, generator=torch.Generator().manual_seed(0)))
    monkeypatch.setattr(command, "_informations", squares)
    monkeypatch.setattr(command, "victim_data", lambda _: SimpleNamespace(public=public, image_shape=(1, 1, 2)))
    target = SimpleNamespace(model=torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)))
    target.trained = lambda _: target
    monkeypatch.setattr(command, "find_target", lambda *_: target)
    monkeypatch.setattr(command, "sent_out", lambda _, model, __: Backbone(MLP((1, 1, 2), (2,)), 2, ONE_CHANNEL))
    places = [entry["folder"] for entry in json.loads(bounded.grid.read_text())["cells"]]
    defenses = [GaussianNoise(0.2, before_averaging=early) for early in (True, False)] + [GaussianNoise(3.0)]

    def cell(place: str, defense: GaussianNoise, **knowledge: str) -> Any:
        built = {"attack": GradientMatching(), "defense": defense, "victims": VictimSettings(batch_size=4)}
        own = {"knowledge": knowledge}
        return SimpleNamespace(kind="attack", folder=place, network="one", settings=own, built=lambda _: built)

    bounded.bounds.unlink()
    write_bounds([cell(*own) for own in zip(places, defenses, strict=True)], bounded)
    found = json.loads(bounded.bounds.read_text())
    assert [found[place]["unbiased_rmse"] for place in places] == pytest.approx([0.1, 0.2, 3.0], rel=1e-9)
    assert len(counted) == 1
    # attackers with the statistics of the batch know more than the update tells
    bounded.bounds.unlink()
    write_bounds([cell(places[0], defenses[0], batch_norm="batch")], bounded)
    refused = {places[0]: {"reason": bound.MORE_THAN_THE_UPDATE}}
    assert json.loads(bounded.bounds.read_text()) == refused
    # but of a network without BatchNorm they have none, though earlier files say so
    told = cell(places[0], defenses[0], batch_norm="batch")
    assert not command.has_other_bounds([told], bounded, BoundSettings())
    bounded.bounds.write_text(json.dumps({places[0]: found[places[0]]}))
    assert command.has_other_bounds([told], bounded, BoundSettings())  # of a release that did not know
    write_bounds([told], bounded)
    assert json.loads(bounded.bounds.read_text()) == refused
    target.model = target.model[0]
    assert command.has_other_bounds([told], bounded, BoundSettings())
    write_bounds([told], bounded)
    assert json.loads(bounded.bounds.read_text()) == {places[0]: found[places[0]]}
    assert not command.has_other_bounds([told], bounded, BoundSettings())


def test_no_noise_bound_for_unbiased_attacks_where_a_batch_leaves_a_direction_open() -> None:
    squares = [torch.eye(2, dtype=torch.float64), torch.diag(torch.tensor([1.0, 0.0], dtype=torch.float64))]
    assert noise_bounds(squares, 0.1, GaussianPrior.isotropic(2, 0.5))["unbiased_rmse"] is None


def test_attacked_errors_stand_beside_their_bounds_and_reasons_below(bounded: RunFolder) -> None:
    (panel,) = bound_panels(Evaluation.read(bounded))
    assert panel.rows == [
        ["noise 0.1, Near, batch 2", "0.200", "0.123", "2.500"],
        ["noise 1, Near, batch 2", "0.200", "0.250", "∞"],
    ]
    assert panel.note == f"No bound above 0 for no defense: {WHY}."


def test_cells_are_named_where_those_of_a_defense_differ(bounded: RunFolder) -> None:
    grid, bounds = (json.loads(path.read_text()) for path in (bounded.grid, bounded.bounds))
    informed = [{**entry, "attack": "far", "folder": f"{entry['folder']}-far"} for entry in grid["cells"]]
    grid |= {"cells": grid["cells"] + informed, "attacks": {"near": "Near", "far": "Far"}, "batch_statistics": ["far"]}
    reasons = [{"reason": WHY}, {"reason": bound.MORE_THAN_THE_UPDATE}, {"not_computed": "it would take long"}]
    bounds |= {entry["folder"]: reason for entry, reason in zip(informed, reasons, strict=True)}
    bounded.grid.write_text(json.dumps(grid))
    bounded.bounds.write_text(json.dumps(bounds))
    (panel,) = bound_panels(Evaluation.read(bounded))
    assert panel.note == (
        f"No bound above 0 for no defense: {WHY}. "
        f"No bound for noise 0.1, Far, knows batch statistics, batch 2: {bound.MORE_THAN_THE_UPDATE}. "
        "Not computed for noise 1, Far, knows batch statistics, batch 2: it would take long."
    )


@pytest.mark.parametrize(
    "reason", ["no bound is known for MixUp", "the information is computed for clients that release one gradient each"]
)
def test_only_without_noise_is_no_bound_above_0(bounded: RunFolder, reason: str) -> None:
    bounds = json.loads(bounded.bounds.read_text())
    bounded.bounds.write_text(
        json.dumps({place: {"reason": reason} if "noise" in place else own for place, own in bounds.items()})
    )
    (panel,) = bound_panels(Evaluation.read(bounded))
    assert panel.note == f"No bound above 0 for no defense: {WHY}. No bound for noise 0.1, noise 1: {reason}."


def test_what_a_bound_leaves_out_is_said_beside_it(bounded: RunFolder) -> None:
    assert "left out" not in bound_panels(Evaluation.read(bounded))[0].lead
    bounds, notes = json.loads(bounded.bounds.read_text()), ["the size of the noise is left out", "so is the mask"]
    for (place, own), n in zip(bounds.items(), (0, 1, 2), strict=True):
        bounds[place] = {**own, "notes": notes[:n]}
    bounded.bounds.write_text(json.dumps(bounds))
    (panel,) = bound_panels(Evaluation.read(bounded))
    assert panel.note == (
        f"No bound above 0 for no defense: {WHY}. "
        f"About the bounds for noise 0.1, noise 1: {notes[0]}; noise 1: {notes[1]}."
    )
    assert "does not use information that is left out" in panel.lead
    build_evaluation(bounded.path)
    rows = csv.DictReader(bounded.table.read_text().splitlines())
    assert [row["bound_notes"] for row in rows] == ["", notes[0], "; ".join(notes)]


def test_page_table_and_record_hold_the_bounds(bounded: RunFolder) -> None:
    assert "Lower bounds on the error" in build_evaluation(bounded.path).read_text()
    rows = list(csv.DictReader(bounded.table.read_text().splitlines()))
    assert [row["bound_rmse"] for row in rows] == ["", "0.123", "0.25"]
    assert [row["bound_reason"] for row in rows] == [WHY, "", ""]
    figures = json.loads(bounded.metrics.read_text())
    assert figures["bound_rmse.noise_0.1.near.b2"] == 0.123
    assert figures["bound_rmse.none_None.near.b2_reason"] == WHY


def test_without_bounds_there_is_no_section(bounded: RunFolder) -> None:
    bounded.bounds.unlink()
    assert bound_panels(Evaluation.read(bounded)) == []
    assert "Lower bounds on the error" not in build_evaluation(bounded.path).read_text()


def test_a_new_beginning_removes_the_bounds(bounded: RunFolder) -> None:
    build_evaluation(bounded.path)
    RunFolder.open(bounded.path, bounded.config.read_text(), overwrite=True)
    assert not bounded.bounds.exists()


NO_MEMORY = [
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory"),
]


@pytest.mark.parametrize("error", NO_MEMORY, ids=lambda error: type(error).__name__)
def test_a_bound_that_lacked_memory_is_not_computed_and_tried_again(
    error: Exception, cell: GridCell, bounded: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(command, "_bound", failing)
    command.write_bounds([cell], bounded)
    said = " ".join(str(error).split()) or "MemoryError"
    expected = {"not_computed": said, "settings": asdict(BoundSettings())}
    assert json.loads(bounded.bounds.read_text()) == {cell.folder: expected}
    (panel,) = bound_panels(Evaluation.read(bounded))
    assert (panel.rows, panel.note) == ([], f"Not computed for noise 0.1: {said}.")
    build_evaluation(bounded.path)
    with bounded.table.open(newline="") as file:
        assert [row["bound_reason"] for row in csv.DictReader(file)] == ["", f"not computed: {said}", ""]
    monkeypatch.setattr(command, "_bound", lambda *_: {"rmse": 0.2, "unbiased_rmse": 0.3})
    command.write_bounds([cell], bounded)
    assert json.loads(bounded.bounds.read_text()) == {cell.folder: {"rmse": 0.2, "unbiased_rmse": 0.3}}


@pytest.mark.parametrize(
    "error", [ConfigError("no bound is known"), NotImplementedError("the derivative for 'igamma' is not implemented")]
)
def test_a_reason_why_there_is_no_bound_is_final(
    error: Exception, cell: GridCell, bounded: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[GridCell] = []

    def failing(one: GridCell, *_: Any) -> Any:
        asked.append(one)
        raise error

    monkeypatch.setattr(command, "_bound", failing)
    for _ in range(2):
        command.write_bounds([cell], bounded)
    assert asked == [cell]
    assert json.loads(bounded.bounds.read_text()) == {cell.folder: {"reason": str(error)}}


def test_a_bound_that_took_too_long_is_computed_in_more_minutes(
    cell: GridCell, bounded: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*arguments: Any) -> Any:
        if arguments[-1].minutes < 20:
            raise TimeLimitError("it would take about 15 minutes")
        return {"rmse": 0.2, "applies_to": "every attack", "unbiased_rmse": 0.3, "clients": 2}

    monkeypatch.setattr(command, "_bound", slow)
    few, more = (BoundSettings(clients=2, minutes=minutes) for minutes in (10, 20))
    command.write_bounds([cell], bounded, few)
    assert bound_panels(Evaluation.read(bounded))[0].note == (
        "Not computed for noise 0.1: it would take about 15 minutes."
    )
    assert [command.has_other_bounds([cell], bounded, settings) for settings in (few, more)] == [False, True]
    command.write_bounds([cell], bounded, more)
    (found,) = json.loads(bounded.bounds.read_text()).values()
    assert found == {**slow(more), "settings": asdict(more)}
    assert not command.has_other_bounds([cell], bounded, few)  # the limit changes no bound that is known


def test_bounds_of_other_clients_are_computed_anew(
    cell: GridCell, bounded: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def counted(*arguments: Any) -> Any:
        asked.append(arguments[-1].clients)
        return {"rmse": 0.2, "applies_to": "every attack", "unbiased_rmse": 0.3, "clients": min(3, asked[-1])}

    monkeypatch.setattr(command, "_bound", counted)
    for clients in (1, 1, 8, 8, 0, 2):  # a grid with three clients
        large = BoundSettings(clients=clients)
        before = len(asked)
        other = command.has_other_bounds([cell], bounded, large)
        command.write_bounds([cell], bounded, large)
        assert other == (len(asked) > before)
    assert asked == [1, 8, 2]
    elsewhere = replace(cell, folder="cells/other")
    command.write_bounds([elsewhere], bounded, BoundSettings(clients=5))  # another part of the grid
    (kept,) = json.loads(bounded.bounds.read_text()).values()
    assert kept["clients"] == 2


def test_bounds_of_earlier_releases_are_those_of_the_clients_that_they_name(cell: GridCell, bounded: RunFolder) -> None:
    bounded.bounds.write_text(json.dumps({cell.folder: {"rmse": 0.2, "unbiased_rmse": 0.3, "clients": 2}}))
    found = [command.has_other_bounds([cell], bounded, BoundSettings(clients=clients)) for clients in (0, 1, 2)]
    assert found == [False, True, True]  # they are means of the two clients' bounds
    large = BoundSettings(clients=2)
    stored = {"rmse": 0.2, "unbiased_rmse": 0.3, "clients": 2, "settings": asdict(large)}
    bounded.bounds.write_text(json.dumps({cell.folder: stored}))
    assert command.has_other_bounds([cell], bounded, large)
    bounded.bounds.write_text(json.dumps({cell.folder: {**stored, "applies_to": "every attack"}}))
    assert not command.has_other_bounds([cell], bounded, large)
    bounded.bounds.write_text(json.dumps({cell.folder: {"rmse": 0.2, "unbiased_rmse": 0.3, "clients": 1}}))
    assert not command.has_other_bounds([cell], bounded, BoundSettings(clients=1))
