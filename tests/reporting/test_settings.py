from __future__ import annotations

from pathlib import Path

import pytest

from lit_recon.errors import ConfigError, CorruptFileError
from lit_recon.reporting.provenance import Difference, differences, find_setting, flatten, is_below, parse_settings


def test_flatten_reaches_every_leaf() -> None:
    nested = parse_settings("a: {b: [1, 2], c: null}\nd:\n- {e: 1}\n- [2, 3]\nf: 2026-03-01\ng: {}")
    assert flatten(nested) == {
        "a.b": [1, 2],
        "a.c": None,
        "d.0.e": 1,
        "d.1": [2, 3],
        "f": "2026-03-01",
    }


def test_differences_name_changed_added_and_removed_keys() -> None:
    before = {"lr": 0.1, "attack": {"steps": 10, "restarts": 1}, "out": "a"}
    after = {"lr": 0.1, "attack": {"steps": 20, "tv": None}, "out": "b"}
    assert differences(before, after, ignored=["out"]) == [
        Difference("attack.restarts", 1, None),
        Difference("attack.steps", 10, 20),
        Difference("attack.tv", None, None),
    ]


def test_ignored_sections_cover_what_is_below_and_no_namesakes() -> None:
    assert is_below("trainer.logger.name", ["trainer.logger"])
    assert is_below("trainer.logger", ["trainer.logger"])
    assert not is_below("trainer.loggers", ["trainer.logger"])


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"knowledge": {"labels": True}}, True),
        ({"run": {"knowledge": {"labels": False}}}, False),
        ({"knowledge": {"class_path": "Knowledge", "init_args": {"labels": True}}}, True),
        ({"my_knowledge": {"labels": True}}, None),
        ({}, None),
    ],
)
def test_find_setting_looks_into_any_section(settings: dict[str, object], found: object) -> None:
    assert find_setting(settings, "knowledge.labels") is found


@pytest.mark.parametrize("text", ["", "- 1\n- 2", "just words", "a: [1"])
def test_what_is_no_mapping_is_refused_with_its_source(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="YAML mapping"):
        parse_settings(text)
    with pytest.raises(CorruptFileError, match=r"config\.yaml must hold a YAML mapping"):
        parse_settings(text, tmp_path / "config.yaml")


def test_yaml_that_builds_objects_is_refused() -> None:
    with pytest.raises(ConfigError, match="could not determine a constructor"):
        parse_settings("a: !!python/object/apply:os.getcwd []")
