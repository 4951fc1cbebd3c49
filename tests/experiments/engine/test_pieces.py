"""The settings of a piece as its command reads them."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from jsonargparse import ArgumentParser, Namespace

from lit_recon.errors import ConfigError
from lit_recon.experiments.engine.pieces import Subcommand
from lit_recon.experiments.update_attack import run

RUN = "lit_recon.experiments.update_attack.run"
SETTINGS: dict[str, Any] = {
    "data": {"class_path": "Digits"},
    "attack": {"class_path": "GradientMatching", "init_args": {"steps": 1, "labels": {"class_path": "HeadCounts"}}},
    "victims": {"n": 2},
    "metrics": ["rmse"],
    "seed": 3,
}
OTHERS: list[dict[str, Any]] = [
    {},
    {"seed": 4},
    {"metrics": ["rmse", "psnr"]},
    {"defense": {"class_path": "GaussianNoise", "init_args": {"std": 0.1}}},
    {"attack": {"class_path": "GradientMatching", "init_args": {"steps": 2}}},
    {"victims": {"batch_size": 2}},
]


def alone(settings: dict[str, Any]) -> Namespace:
    values: Namespace = run.parser("run").parse_object(settings)
    values.pop("config", None)
    return values


@pytest.mark.parametrize("changed", OTHERS, ids=lambda changed: "-".join(changed) or "same")
def test_settings_that_share_sections_are_read_as_if_alone(changed: dict[str, Any]) -> None:
    command = Subcommand("run", RUN)
    command.values(SETTINGS)
    settings = {**SETTINGS, **changed}
    assert command.values(settings) == alone(settings)
    fewer = {key: settings[key] for key in ("victims", "data")}
    assert command.values(fewer) == alone(fewer)


@pytest.mark.parametrize("changed", OTHERS, ids=lambda changed: "-".join(changed) or "same")
def test_settings_that_share_sections_are_completed_as_if_alone(changed: dict[str, Any]) -> None:
    command = Subcommand("run", RUN)
    command.canonical(SETTINGS)["data"]["class_path"] = "changed"
    settings = {**SETTINGS, **changed}
    whole = run.parser("run").dump(alone(settings), skip_unset=False)
    expected = {key: value for key, value in yaml.safe_load(whole).items() if key != "config"}
    found = command.canonical(settings)
    assert found == expected
    assert [*found] == [*expected]  # the order in which they are written to a file


def test_a_section_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    command, read = Subcommand("run once", RUN), []
    plain = ArgumentParser.parse_object

    def counting(self: ArgumentParser, settings: dict[str, Any], *rest: Any, **options: Any) -> Namespace:
        if self.prog == command.name:
            read.append(sorted(settings))
        return plain(self, settings, *rest, **options)

    monkeypatch.setattr(ArgumentParser, "parse_object", counting)
    command.values(SETTINGS)
    command.values({**SETTINGS, "seed": 4})
    command.values(SETTINGS)
    assert read == [sorted(SETTINGS), ["seed"], []]


def test_what_is_done_with_the_values_stays_with_the_piece() -> None:
    command = Subcommand("run", RUN)
    first, expected = command.values(SETTINGS), alone(SETTINGS)
    first.victims.n = 7
    first.attack.init_args.steps = 7
    first.metrics.append("ssim")
    assert command.values(SETTINGS) == expected


def test_a_section_that_is_refused_is_refused_again() -> None:
    command = Subcommand("run", RUN)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"victims.n: expected int; got x"):
            command.values({**SETTINGS, "victims": {"n": "x"}})
        with pytest.raises(ConfigError, match="unknown option 'victim'"):
            command.values({**SETTINGS, "victim": 1})
