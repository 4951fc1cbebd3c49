"""`train.py zoo`: a folder of checkpoints, each trained by its own command, and a manifest with their hashes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from filelock import FileLock
from jsonargparse import ArgumentParser, Namespace

from lit_recon.errors import ConfigError, CorruptFileError, MissingDataError, RunExistsError
from lit_recon.experiments.configuration import SAME_RUN, find_configuration, instantiated, settings_of, settings_parser
from lit_recon.experiments.engine.pieces import Subcommand, merged, settings_hash
from lit_recon.experiments.engine.runner import refuse_several_processes
from lit_recon.experiments.pages import build_page, lacks_page
from lit_recon.experiments.settings import BackboneSettings, TrainSettings
from lit_recon.experiments.train.generator import GeneratorSettings
from lit_recon.io.files import file_hash, write_text
from lit_recon.modules.generator import GENERATOR_FILE
from lit_recon.reporting.provenance import differences, read_settings
from lit_recon.reporting.record import read_json, read_metrics
from lit_recon.reporting.run_folder import RunFolder
from lit_recon.training.module import BACKBONE_FILE

#: Inside the folder of a zoo: its members, their files and hashes.
MANIFEST = "zoo.json"


class _Kind(NamedTuple):
    """A command that trains a member, the file that it leaves, and the dataclasses of its settings."""

    command: Subcommand
    file: str
    schemas: tuple[type[Any], ...]


_KINDS = {
    "backbone": _Kind(
        Subcommand("train.py backbone", "lit_recon.experiments.train.backbone"),
        BACKBONE_FILE,
        (TrainSettings, BackboneSettings),
    ),
    "generator": _Kind(
        Subcommand("train.py generator", "lit_recon.experiments.train.generator"), GENERATOR_FILE, (GeneratorSettings,)
    ),
}
#: Facts of a run that the manifest repeats, besides all versions.
_FACTS = (
    *("accuracy", "accuracy_reason", "final_train_loss", "search_rmse", "epochs", "split_hash", "seed"),
    *("device", "cpu_count", "platform", "created", "seconds"),
)
_DATA_ROOT = "data.init_args.root"


@dataclass(frozen=True, kw_only=True)
class ZooMember:
    """A checkpoint of a zoo.

    Args:
        config: configuration of the training: a file, or the name of a shipped one in configs/train.
        command: command of train.py that trains it.
        settings: settings that replace those of the configuration.
    """

    config: str
    command: Literal["backbone", "generator"] = "backbone"
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ZooSettings:
    """One call of `train.py zoo`.

    Args:
        members: checkpoints by name; default: those of configs/zoo/small.yaml.
        out: folder of the zoo, with a run folder for each member.
        only: names of members that this call trains or verifies; default: all.
        data_root: folder of all data sets that are downloaded; default: those of the members' configurations.
        verify: train nothing; compare the files of the members with the hashes in the manifest.
        overwrite: train the one member that `only` names again.
    """

    members: dict[str, ZooMember]
    out: Path = Path("runs/zoo")
    only: list[str] = field(default_factory=list)
    data_root: Path | None = None
    verify: bool = False
    overwrite: bool = False

    def __post_init__(self) -> None:
        if wrong := [name for name in self.members if not re.fullmatch(r"\w[\w.-]*", name)]:
            raise ConfigError(
                f"the name of a member is that of its folder, of letters, digits, '_', '-' and '.'; got {wrong[0]!r}"
            )
        if self.overwrite and (self.verify or len(self.only) != 1):
            raise ConfigError(
                "overwrite trains one member again, which only names, and nothing is trained by verify; got "
                f"only={self.only} and verify={str(self.verify).lower()}"
            )
        if not self.verify and (unknown := sorted({*self.only} - {*self.members})):
            raise ConfigError(f"only must name some of {', '.join(self.members)}; got {', '.join(unknown)}")


def parser(program: str) -> ArgumentParser:
    """The command's settings."""
    settings = settings_parser(program, "Train the checkpoints of a zoo, or verify them.", ZooSettings)
    shipped = find_configuration("small", "zoo")
    settings.set_defaults(members=read_settings(shipped)["members"])
    return settings


def execute(arguments: ArgumentParser, values: Namespace) -> None:
    """Verify the members that are there, and train or resume the others, unless told not to."""
    values = values.clone()
    values.pop("config", None)
    settings = settings_of(ZooSettings, instantiated(arguments, values))
    if settings.verify:
        _verify(settings)
        return
    refuse_several_processes(arguments.prog)
    chosen = [name for name in settings.members if name in (settings.only or settings.members)]
    trainings = {name: _training(settings.members[name], settings.data_root) for name in chosen}
    recorded = _read(settings.out)
    if not settings.overwrite:
        for name in chosen:
            _refuse_other(settings.out, name, trainings[name], recorded)
    for position, (name, training) in enumerate(trainings.items(), start=1):
        folder, title = settings.out / name, f"[{position}/{len(chosen)}] {name}"
        if name in recorded and not settings.overwrite:
            print(f"{title}: kept, {recorded[name]['file']}", flush=True)
            continue
        kind = _KINDS[settings.members[name].command]
        print(f"{title}: {kind.command.name}, {settings.members[name].config}", flush=True)
        if settings.overwrite:
            _note(settings.out, name, None)
        if settings.overwrite or not RunFolder(folder).is_complete:
            threads = torch.get_num_threads()
            kind.command.run({**training, "overwrite": settings.overwrite}, folder)
            torch.set_num_threads(threads)  # a member's own number is not for the next one: threads round differently
        if lacks_page(folder):  # killed just before it
            build_page(folder)
        _note(settings.out, name, _entry(settings.out, name, kind, training))
    print(f"manifest    {settings.out / MANIFEST}")


def _training(member: ZooMember, data_root: Path | None) -> dict[str, Any]:
    """All settings of a member's training; a LitReconError if they are not valid."""
    path = find_configuration(member.config, "train")
    kind = _KINDS[member.command]
    own = kind.command.canonical(merged(read_settings(path), member.settings))
    data = own["data"].get("init_args", {})
    if data_root is not None and "download" in data:
        data["root"] = str(data_root)
    built = kind.command.built(own)
    for schema in kind.schemas:
        settings_of(schema, built)
    return own


def _entry(zoo: Path, name: str, kind: _Kind, training: Mapping[str, Any]) -> dict[str, Any]:
    """What the manifest says of a member whose training has ended."""
    metrics = read_metrics(RunFolder(zoo / name).metrics)
    facts = {key: value for key, value in metrics.items() if key in _FACTS or key.startswith("version_")}
    data = training["data"]
    given = {key: value for key, value in data.get("init_args", {}).items() if key not in ("root", "download")}
    return {
        "file": f"{name}/{kind.file}",
        "sha256": file_hash(zoo / name / kind.file),
        "command": kind.command.name,
        "settings_hash": settings_hash({**training, "data": {**data, "init_args": given}}),  # data have a split_hash
        **facts,
    }


def _refuse_other(zoo: Path, name: str, training: Mapping[str, Any], recorded: Mapping[str, Any]) -> None:
    """Refuse a member that was trained with other settings, or whose recorded file has changed."""
    folder = RunFolder(zoo / name)
    if name in recorded:
        _check_file(zoo, name, recorded[name])
    if folder.is_complete:
        there = read_settings(folder.config)
        if found := differences(there, training, (*SAME_RUN, _DATA_ROOT)):
            raise RunExistsError(
                f"{folder.path} was trained with other settings ({'; '.join(map(str, found[:3]))}): choose another "
                f"folder with --out, or train it again with {_again(name)}"
            )


def _verify(settings: ZooSettings) -> None:
    """Compare files with the manifest; MissingDataError for missing files, CorruptFileError for changed ones."""
    recorded = _read(settings.out)
    if not recorded or (absent := sorted({*settings.only} - {*recorded})):
        raise MissingDataError(
            f"{settings.out / MANIFEST} lists no {absent[0] if recorded else 'members'}: train first, without --verify"
        )
    for name in settings.only or recorded:
        _check_file(settings.out, name, recorded[name])
        print(f"{recorded[name]['sha256']}  {settings.out / recorded[name]['file']}")


def _check_file(zoo: Path, name: str, entry: Mapping[str, Any]) -> None:
    path, expected = zoo / str(entry["file"]), entry["sha256"]
    if not path.is_file():
        raise MissingDataError(
            f"{path} is missing, which {zoo / MANIFEST} lists: restore it, or train it again with {_again(name)}"
        )
    if (found := file_hash(path)) != expected:
        raise CorruptFileError(
            f"{path} has changed: its SHA-256 is {found}, but {zoo / MANIFEST} says {expected}: restore it, or train "
            f"it again with {_again(name)}"
        )


def _again(name: str) -> str:
    return f'--only "[{name}]" --overwrite true'


def _read(zoo: Path) -> dict[str, dict[str, Any]]:
    """The members in the manifest; none if there is no manifest yet."""
    path = zoo / MANIFEST
    if not path.exists():
        return {}
    members = read_json(path, remedy := "restore it, or delete it to have it made again").get("members")
    if isinstance(members, dict) and all(
        isinstance(entry, dict) and {"file", "sha256"} <= entry.keys() for entry in members.values()
    ):
        return members
    raise CorruptFileError(f"{path} must hold members with file and sha256 each: {remedy}")


def _note(zoo: Path, name: str, entry: Mapping[str, Any] | None) -> None:
    """Replace the entry of one member in the manifest, or remove it; other calls may do so for theirs."""
    zoo.mkdir(parents=True, exist_ok=True)
    with FileLock(zoo / f".{MANIFEST}.lock"):
        members = {other: own for other, own in _read(zoo).items() if other != name}
        if entry is not None:
            members[name] = dict(entry)
        write_text(zoo / MANIFEST, json.dumps({"version": 1, "members": members}, indent=2) + "\n")
