"""Run folders that were read, or ended in another error, before they were fuzzed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lit_recon import cli
from lit_recon.attacks.released.retraining.anderson import SearchState
from lit_recon.attacks.released.retraining.state import read_state
from lit_recon.attacks.shadow.store import ShadowStore
from lit_recon.clients.record import Circumstances, RecordedUpdate
from lit_recon.errors import ConfigError, CorruptFileError
from lit_recon.experiments.audit.attacks import read_outcome
from lit_recon.experiments.evaluate.bounds import write_bounds
from lit_recon.experiments.evaluate.results import Evaluation
from lit_recon.modules.attack_state import load_finished, run_attack
from lit_recon.reporting.pages import build_report
from lit_recon.reporting.record import read_images, read_table
from lit_recon.reporting.run_folder import RunFolder
from lit_recon.training.module import read_utility
from tests.fuzzing.payloads import MARK, SCRIPTS
from tests.fuzzing.run_files import METRICS, SETTINGS, check_page, make_evaluation, make_run
from tests.fuzzing.search_files import search_file
from tests.fuzzing.tensor_files import finished_file, joined, outcome_file, split, update_file
from tests.fuzzing.torch_files import _observation, running_file


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A finished run."""
    return make_run(tmp_path / "run")


def test_a_page_escapes_every_name(tmp_path: Path) -> None:
    for number, script in enumerate(SCRIPTS):
        settings = {**SETTINGS, "name": script, script: script, "client": {"batch_norm": script}}
        settings["paper"] = {"citation": script, "values": {"rmse": script, script: 1.0}, "note": script}
        run = make_run(tmp_path / f"{number}", settings)
        texts = dict.fromkeys(("device", "command", "created", "lpips_reason", "version_torch"), script)
        formats = {"rmse": {"name": script, "higher_is_better": False, "decimals": 3, "unit": script}}
        stated = {**METRICS, **texts, script: script, "notes": [script], "formats": formats}
        run.metrics.write_text(json.dumps(stated))
        header, body = split(run.reconstructions.read_bytes())
        header["__metadata__"]["class_names"] = json.dumps([script, script])
        run.reconstructions.write_bytes(joined(json.dumps(header).encode(), body))
        page = build_report(run.path)
        assert MARK in page.read_text()
        check_page(page)


def test_a_name_that_is_no_unicode_does_not_end_a_report(run: RunFolder) -> None:
    run.metrics.write_text(json.dumps({**METRICS, "device": "\ud800", "notes": ["\udcff"]}))
    assert "\\udcff" in build_report(run.path).read_text()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.5, 1.5])
def test_images_are_pixels(run: RunFolder, value: float) -> None:
    tensors = load_file(run.reconstructions)
    tensors["targets"][0, 0, 0, 0] = value
    save_file(tensors, run.reconstructions)
    with pytest.raises(CorruptFileError, match=r"reconstructions\.safetensors must hold float32 pixels in \[0, 1\]"):
        read_images(run.reconstructions)


def test_class_names_that_are_no_list(run: RunFolder) -> None:
    for names in ("{}", '"cat"', "[" * 100_000, "5"):
        header, body = split(run.reconstructions.read_bytes())
        header["__metadata__"]["class_names"] = names
        run.reconstructions.write_bytes(joined(json.dumps(header).encode(), body))
        with pytest.raises(CorruptFileError, match=r"reconstructions\.safetensors"):
            read_images(run.reconstructions)


def test_two_columns_of_one_name(run: RunFolder) -> None:
    run.victims.write_text(run.victims.read_text().replace("psnr", "rmse"))
    with pytest.raises(CorruptFileError, match="several columns rmse"):
        read_table(run.victims, ())


def test_a_table_of_another_run(run: RunFolder) -> None:
    lines = run.victims.read_text().splitlines()
    run.victims.write_text("\n".join([lines[0], *lines[2:], lines[1]]))
    with pytest.raises(CorruptFileError, match="two runs"):
        build_report(run.path)


@pytest.mark.parametrize("file", ["metrics.json", "grid.json"])
@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a": 1, "a": 2}', "[]", "\ufeff{}"], ids=["deep", "twice", "list", "mark"]
)
def test_json_that_is_refused(tmp_path: Path, file: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    if file == "grid.json":
        make_evaluation(tmp_path / "run")
        (tmp_path / "run" / file).write_text(text, encoding="utf-8")
        with pytest.raises(CorruptFileError, match=r"grid\.json"):
            Evaluation.read(tmp_path / "run")
        return
    make_run(tmp_path / "run")
    (tmp_path / "run" / file).write_text(text, encoding="utf-8")
    assert cli.attack(["report", str(tmp_path / "run")]) == 2
    assert file in capsys.readouterr().err


def test_entries_of_a_study_that_are_none(tmp_path: Path) -> None:
    make_evaluation(tmp_path / "run")
    path = tmp_path / "run" / "grid.json"
    known = json.loads(path.read_text())
    first = known["cells"][1]
    odd = {"defense": [], "attack": {}, "strength": "a", "batch_size": None, "aware": 5, "paper": [], "repetition": "a"}
    more: list[dict[str, Any]] = [{"cells": [{**first, name: value}]} for name, value in odd.items()]
    more += [{"attacks": {"near": []}}, {"malicious": 5}, {"malicious": [[]]}, {"max_accuracy_drops": ["a"]}]
    for change in ({"cells": [[]]}, {"cells": ["a"]}, {"metric": 5}, {"metric": []}, {"cells": None}, *more):
        path.write_text(json.dumps({**known, **change}))
        with pytest.raises(CorruptFileError, match=r"grid\.json"):
            Evaluation.read(tmp_path / "run")


#: Commands by a setting, and files whose pages read entries without a look at what they are.
KINDS = {
    "audit": ("attack.py audit", {"audit.json": {"findings": [5]}}, {"n_images": 1, "n_certified": 0}),
    "rero": ("reconn.py rero", {"rero.json": {}}, {"n": 1}),
    "glm": ("reconn.py glm", {}, {"n": 1}),
    "membership": ("reconn.py membership", {}, {"n": 1}),
    "generator": ("train.py generator", {}, {"n": "many"}),
    "trainset": (
        "attack.py trainset",
        {"study.json": {"cells": [], "refused": {}, "known": {}, "elsewhere": False}},
        {},
    ),
    "bounds": ("attack.py bounds", {"study.json": {"cells": 5}}, {}),
    "factors": ("reconn.py factors", {"factors.json": {"base": [], "factors": {"a": 5}, "kappas": []}}, {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_pages_of_folders_that_hold_something_else(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command, files, metrics = KINDS[kind]
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(
        f"# lit_recon run of `{command}`: pass this file to --config, with another --out, to repeat it.\nseed: 0\n"
    )
    (run / "metrics.json").write_text(json.dumps(metrics))
    for name, content in files.items():
        (run / name).write_text(json.dumps(content))
    assert cli.attack(["report", str(run)]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert told.count("\n") == 1
    assert str(run) in told


def test_finished_victims_of_another_run(tmp_path: Path) -> None:
    """Files of two runs have the same names, and the same shapes."""
    from lit_recon.modules.attack_state import save_finished

    (tmp_path / "victims_0000-0001.safetensors").write_bytes(finished_file())
    save_finished(tmp_path, list(load_finished(tmp_path).values()), "0123")
    assert len(load_finished(tmp_path, "0123")) == 2
    assert len(load_finished(tmp_path)) == 2
    with pytest.raises(CorruptFileError, match="another|other settings"):
        load_finished(tmp_path, "4567")


def test_the_state_of_a_running_attack_of_another_run(tmp_path: Path) -> None:
    attack, seen = _observation()
    path = tmp_path / "state.pt"

    def resume(identity: str) -> Any:
        return run_attack(attack, [seen], path, 0.0, "loop", lambda state, new: None, identity)

    resume("0123")
    resume("0123")
    with pytest.raises(CorruptFileError, match=r"state\.pt is damaged or of another attack .*other settings"):
        resume("4567")


def test_a_running_state_whose_bytes_were_changed(tmp_path: Path) -> None:
    attack, seen = _observation()
    path, content = tmp_path / "state.pt", bytearray(running_file())
    with torch.serialization.safe_globals([]):
        state = torch.load(_written(path, bytes(content)), weights_only=True)
    tensor = next(value for value in _tensors(state) if value.numel() > 16)
    content[content.index(tensor.detach().numpy().tobytes()) + 1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptFileError, match="checksum"):
        run_attack(attack, [seen], path, 0.0, "loop", lambda state, new: None)


def test_labels_of_a_running_state_that_the_model_does_not_have(tmp_path: Path) -> None:
    attack, seen = _observation()
    path = _written(tmp_path / "state.pt", running_file())
    content = torch.load(path, weights_only=True)
    content["attack"]["problems"][0]["labels"] = torch.tensor([7, 7])
    torch.save(content, path)
    with pytest.raises(CorruptFileError, match="labels are not 0 to 2"):
        run_attack(attack, [seen], path, 0.0, "loop", lambda state, new: None)
    content["attack"]["problems"][0]["images"] = 5
    torch.save(content, path)
    with pytest.raises(CorruptFileError, match="damaged or of another attack"):
        run_attack(attack, [seen], path, 0.0, "loop", lambda state, new: None)


def _written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def _tensors(content: Any) -> Any:
    if isinstance(content, torch.Tensor):
        yield content.contiguous()
    elif isinstance(content, dict | list | tuple):
        for value in content.values() if isinstance(content, dict) else content:
            yield from _tensors(value)


@pytest.mark.parametrize(
    "own",
    [{"steps": "1"}, {"seconds": None}, {"notes": 5}, {"notes": [1]}, {"certified": 1.5}, {"loss": "x"}, {"name": []}],
    ids=str,
)
def test_outcomes_of_an_audit(tmp_path: Path, own: dict[str, Any]) -> None:
    header, body = split(outcome_file())
    known = json.loads(header["__metadata__"]["lit_recon_audit"])
    for changed in ({**known, **own}, {key: value for key, value in known.items() if key not in own}):
        header["__metadata__"]["lit_recon_audit"] = json.dumps(changed)
        path = _written(tmp_path / "analytic.safetensors", joined(json.dumps(header).encode(), body))
        with pytest.raises(CorruptFileError, match=r"analytic\.safetensors"):
            read_outcome(path)


def test_the_state_of_a_search_whose_parts_do_not_fit(tmp_path: Path) -> None:
    path = _written(tmp_path / "search.safetensors", search_file())
    tensors = load_file(path)
    save_file({**tensors, "labels": tensors["labels"][:1].clone()}, path)
    with pytest.raises(CorruptFileError, match=r"search\.safetensors"):
        read_state(path, SearchState)


@pytest.mark.parametrize(
    "own",
    [{"batches": True}, {"steps": 1.5}, {"batch_size": 2.5}, {"lr": True}, {"momentum": "a"}, {"weight_decay": []}],
    ids=str,
)
def test_circumstances_of_a_recorded_update(tmp_path: Path, own: dict[str, Any]) -> None:
    header, body = split(update_file())
    known = json.loads(header["__metadata__"]["lit_recon_update"])
    header["__metadata__"]["lit_recon_update"] = json.dumps({**known, **own})
    path = _written(tmp_path / "update.safetensors", joined(json.dumps(header).encode(), body))
    with pytest.raises(CorruptFileError, match=r"update\.safetensors"):
        RecordedUpdate.load(path)
    with pytest.raises((ConfigError, TypeError)):
        Circumstances(**own)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"training": [], "version": 3, "execution": "a", "shard_size": 0}'])
def test_descriptions_of_stores(tmp_path: Path, text: str) -> None:
    (tmp_path / "store.json").write_text(text)
    with pytest.raises(CorruptFileError, match=r"store\.json"):
        ShadowStore.open(tmp_path, {"a": 1})


@pytest.mark.parametrize("text", ["[" * 100_000, "5", '{"accuracy": 1, "accuracy": 0}'])
def test_small_files_beside_a_run(tmp_path: Path, text: str) -> None:
    (tmp_path / "utility.json").write_text(text)
    with pytest.raises(CorruptFileError, match=r"utility\.json"):
        read_utility(tmp_path)
    folder = RunFolder(tmp_path)
    folder.bounds.write_text(text)
    with pytest.raises(CorruptFileError, match=r"bounds\.json"):
        write_bounds([], folder)
