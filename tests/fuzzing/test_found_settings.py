"""Configurations that were read, or ended in another error, before they were fuzzed."""

from __future__ import annotations

from pathlib import Path

import pytest

from lit_recon import cli
from lit_recon.errors import ConfigError, CorruptFileError
from lit_recon.metrics import metrics_of
from lit_recon.reporting.provenance import parse_settings, read_settings
from lit_recon.reporting.run_folder import RunFolder
from tests.fuzzing.payloads import CANARY, HARMFUL_YAML
from tests.fuzzing.settings_files import _BOMB


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("seed: 1\nseed: 2\n", "'seed' is there several times"),
        ("attack:\n  init_args: {lr: 1, lr: 2}\n", "'lr' is there several times"),
        ("'seed': 1\n\"se\\u0065d\": 2\n", "'seed' is there several times"),
        ("a: &a [*a]\n", "holds it"),
        (_BOMB, "aliases"),
        ("[" * 5000, "RecursionError|recursion"),
        ("seed: 2001-99-99\n", "month"),
        ("seed: !!int abc\n", "abc"),
        ("seed: !!bool x\n", "x"),
        ("seed: !!timestamp x\n", "groupdict"),
        ("seed: " + "9" * 5000 + "\n", "digits"),
        *((text, "could not determine") for text in HARMFUL_YAML),
        *((f"a: {text}", "could not determine") for text in HARMFUL_YAML),
    ],
    ids=lambda text: text[:24],
)
def test_yaml_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    CANARY.unlink(missing_ok=True)
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(CorruptFileError, match=reason) as error:
        read_settings(path)
    assert str(path) in str(error.value)
    with pytest.raises(ConfigError):
        parse_settings(text)
    assert not CANARY.exists()


def test_keys_that_override_merged_ones_are_no_repetition() -> None:
    text = "base: &base {lr: 1, steps: 2}\nown: {<<: *base, lr: 3}\nother: {<<: *base}\nthird: {<<: [*base, {a: 1}]}\n"
    found = parse_settings(text)
    assert found["own"] == {"lr": 3, "steps": 2}
    assert found["other"] == {"lr": 1, "steps": 2}
    assert found["third"] == {"lr": 1, "steps": 2, "a": 1}


@pytest.mark.parametrize("content", [b"\xff\xfe", None], ids=["no text", "a folder"])
def test_settings_that_cannot_be_read(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "config.yaml"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(CorruptFileError, match=r"config\.yaml"):
        read_settings(path)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["attack", "reconn", "train"])
@pytest.mark.parametrize(
    "text", ["seed: 1\nseed: 2\n", "seed: !!bool x\n", "a: &a [*a]\n", "[" * 5000, _BOMB], ids=range(5)
)
def test_commands_name_the_file(script: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a repeated key the last was taken; the others ended in a traceback, some only after minutes."""
    path = tmp_path / "odd.yaml"
    path.write_text(text)
    command = {"train": "backbone"}.get(script, "run")
    assert getattr(cli, script)([command, "--config", str(path), "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert told.count("\n") == 1
    assert "odd.yaml" in told
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "section", ["trainer: 3\n", "wandb: [1]\n", "backbone: text\n", "victims: 0.5\n", "client: true\n"]
)
def test_a_value_in_the_place_of_a_section(section: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "odd.yaml").write_text(section)
    assert cli.attack(["run", "--config", str(tmp_path / "odd.yaml"), "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert told.count("\n") == 1
    assert not (tmp_path / "out").exists()


LARGE = "1" + "0" * 400


@pytest.mark.parametrize(
    "given",
    [
        ["--save_every_seconds", LARGE],
        [f"--save_every_seconds=-{LARGE}"],
        ["--save_every_seconds", "0x" + "f" * 300],
        ["--backbone.dp", f"{{max_grad_norm: {LARGE}}}"],
    ],
    ids=range(4),
)
def test_an_integer_that_is_no_float(given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The parser of settings ended in an OverflowError."""
    option = given[0].partition("=")[0]
    assert cli.attack(["run", *given, "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith(f"error: {option}: the number ")
    (tmp_path / "odd.yaml").write_text(f"save_every_seconds: {LARGE}\n")
    assert cli.attack(["run", "--config", str(tmp_path / "odd.yaml"), "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"error: {tmp_path / 'odd.yaml'} must hold")
    assert "must be below 1e308" in told
    assert told.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["../../x", ".a.b", "..", "a..b", "nowhere"])
def test_metrics_at_paths_that_are_none(name: str) -> None:
    with pytest.raises(ConfigError, match="there is no metric"):
        metrics_of([name])


def test_a_run_folder_with_a_damaged_configuration_is_left_alone(tmp_path: Path) -> None:
    folder = RunFolder.open(tmp_path / "run", "seed: 1\n")
    folder.config.write_bytes(folder.config.read_bytes() + b"\xff")
    with pytest.raises(CorruptFileError, match=r"config\.yaml"):
        RunFolder.open(tmp_path / "run", "seed: 1\n")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("backbone:\n  cache: null\n", "backbone.cache must not be null: leave it out for its default, runs/backbones"),
        ("backbone:\n  flip: null\n", "backbone.flip must not be null"),
        ("clients_per_batch: null\ndata: null\n", "data must not be null"),
    ],
)
def test_null_where_a_value_is_needed(text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It was taken for a path, or for false."""
    (tmp_path / "null.yaml").write_text(text)
    assert cli.attack(["run", "--config", "demo_digits", "--config", str(tmp_path / "null.yaml")]) == 2
    assert said in capsys.readouterr().err
