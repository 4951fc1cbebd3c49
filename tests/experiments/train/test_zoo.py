"""`train.py zoo`: a zoo of digits, its manifest, and what it refuses."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
import yaml

from lit_recon.cli import attack, train
from lit_recon.errors import ConfigError
from lit_recon.experiments.configuration import find_configuration
from lit_recon.experiments.train.zoo import ZooMember, ZooSettings, _training
from lit_recon.models import load_backbone
from tests.processes import Script

ROOT = Path(__file__).parents[3]
CONVNET = {"epochs": 1, "n_train": 100, "trunk": {"init_args": {"widths": [4]}}}
GENERATOR = {
    "n_train": 64,
    "epochs": 1,
    "latent_size": 4,
    "width": 4,
    "critic_width": 4,
    "n_shown": 3,
    "search_steps": 2,
}
MEMBERS = {
    "threads": {"config": "convnet_digits", "settings": {**CONVNET, "trainer": {"threads": 2}}},
    "convnet": {"config": "convnet_digits", "settings": CONVNET},
    "generator": {"command": "generator", "config": "generator_digits", "settings": GENERATOR},
}
FILES = {name: "generator.safetensors" if name == "generator" else "backbone.safetensors" for name in MEMBERS}


@pytest.fixture(autouse=True)
def no_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    path.write_text(yaml.safe_dump({"members": MEMBERS}, sort_keys=False))
    return str(path)


@pytest.fixture(scope="module")
def made(config: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "zoo"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "disabled")
        assert train(["zoo", "--config", config, "--out", str(folder)]) == 0
    return folder


@pytest.fixture
def zoo(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return shutil.copytree(made, tmp_path / "zoo")


def manifest(zoo: Path) -> dict[str, dict[str, object]]:
    return dict(json.loads((zoo / "zoo.json").read_text())["members"])


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line about input that a command refuses."""
    capsys.readouterr()
    assert train(["zoo", *map(str, arguments)]) == 2
    line = capsys.readouterr().err
    assert line.startswith("error: ")
    assert line.count("\n") == 1
    return line


def test_the_manifest_says_what_was_trained_and_where(made: Path) -> None:
    members = manifest(made)
    assert {name: entry["file"] for name, entry in members.items()} == {
        name: f"{name}/{file}" for name, file in FILES.items()
    }
    for name, entry in members.items():
        assert entry["sha256"] == hashlib.sha256((made / name / FILES[name]).read_bytes()).hexdigest()
        assert entry["version_torch"] == torch.__version__
        assert {"device", "created", "split_hash", "settings_hash", "version_lit_recon"} <= entry.keys()
    assert members["convnet"]["accuracy"] == load_backbone(made / "convnet" / FILES["convnet"]).accuracy
    assert members["generator"]["command"] == "train.py generator"
    threads, convnet, generator = (entry["settings_hash"] for entry in members.values())
    assert threads == convnet != generator, "threads are no setting of the training"


def test_a_member_is_that_of_its_own_command(made: Path, tmp_path: Path) -> None:
    settings = ["--epochs", "1", "--n_train", "100", "--trunk.widths", "[4]"]
    assert train(["backbone", "--config", "convnet_digits", *settings, "--out", str(tmp_path / "run")]) == 0
    alone = hashlib.sha256((tmp_path / "run" / "backbone.safetensors").read_bytes()).hexdigest()
    assert alone == manifest(made)["convnet"]["sha256"]


def test_threads_of_a_member_end_with_it(config: str, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    assert train(["zoo", "--config", config, "--out", str(tmp_path), "--only", "[threads]"]) == 0
    assert torch.get_num_threads() == before != 2


def test_a_member_that_was_killed_before_its_page_gets_it(zoo: Path, config: str) -> None:
    page = zoo / "generator" / "report.html"
    before = page.read_text()
    page.unlink()
    members = {name: entry for name, entry in manifest(zoo).items() if name != "generator"}
    (zoo / "zoo.json").write_text(json.dumps({"version": 1, "members": members}))
    assert train(["zoo", "--config", config, "--out", str(zoo)]) == 0
    assert page.read_text() == before


def test_a_later_call_keeps_and_verifies(
    zoo: Path, config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path: path.stat().st_mtime_ns for path in zoo.rglob("*.safetensors")}
    assert train(["zoo", "--config", config, "--out", str(zoo)]) == 0
    assert {path: path.stat().st_mtime_ns for path in zoo.rglob("*.safetensors")} == before
    capsys.readouterr()
    monkeypatch.chdir(zoo)
    assert train(["zoo", "--verify", "true", "--out", "."]) == 0
    hashes = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert hashes == [[entry["sha256"], entry["file"]] for entry in manifest(zoo).values()]


def test_a_zoo_of_nothing_but_weights_and_manifest_is_kept(zoo: Path, config: str) -> None:
    files = {zoo / name / file for name, file in FILES.items()} | {zoo / "zoo.json"}
    for path in zoo.rglob("*"):
        if path.is_file() and path not in files:
            path.unlink()
    before = (zoo / "zoo.json").read_bytes()
    assert train(["zoo", "--config", config, "--out", str(zoo)]) == 0
    assert (zoo / "zoo.json").read_bytes() == before
    assert not list(zoo.rglob("metrics.json"))


@pytest.mark.parametrize("call", [["--verify", "true"], []])
def test_a_changed_file_is_refused(zoo: Path, config: str, call: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    path = zoo / "convnet" / "backbone.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    line = refused(capsys, "--config", config, "--out", zoo, *call)
    assert f"{path} has changed: its SHA-256 is {hashlib.sha256(content).hexdigest()}" in line
    assert '--only "[convnet]" --overwrite true' in line
    assert train(["zoo", "--config", config, "--out", str(zoo), "--only", "[generator]", *call]) == 0
    path.unlink()
    assert f"{path} is missing" in refused(capsys, "--config", config, "--out", zoo, *call)


def test_a_changed_member_is_trained_again_when_told(
    made: Path, zoo: Path, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (zoo / "convnet" / "backbone.safetensors").write_bytes(b"damaged")
    assert train(["zoo", "--config", config, "--out", str(zoo), "--only", "[convnet]", "--overwrite", "true"]) == 0
    assert manifest(zoo)["convnet"]["sha256"] == manifest(made)["convnet"]["sha256"]
    assert train(["zoo", "--verify", "true", "--out", str(zoo)]) == 0


def test_a_member_with_other_settings_is_refused_before_any_training(
    zoo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.yaml"
    changed = {**MEMBERS["convnet"], "settings": {**CONVNET, "lr": 0.5}}
    other.write_text(yaml.safe_dump({"members": {"new": MEMBERS["convnet"], "convnet": changed}}))
    line = refused(capsys, "--config", other, "--out", zoo)
    assert "convnet was trained with other settings (lr: 0.02 there, 0.5 now)" in line
    assert not (zoo / "new").exists()


@pytest.mark.processes
@pytest.mark.slow
def test_a_killed_call_goes_on_where_it_stopped(tmp_path: Path) -> None:
    long = {**MEMBERS["convnet"], "settings": {**CONVNET, "epochs": 30}}
    config, zoo = tmp_path / "two.yaml", tmp_path / "zoo"
    config.write_text(yaml.safe_dump({"members": {"convnet": MEMBERS["convnet"], "second": long}}, sort_keys=False))
    arguments = ["zoo", "--config", str(config), "--out", str(zoo)]
    killed = Script(ROOT / "train.py", *arguments, cwd=tmp_path)
    while not (zoo / "second" / "checkpoints" / "last.ckpt").exists():
        assert killed.poll() is None, killed.communicate()
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=60)
    assert [*manifest(zoo)] == ["convnet"]
    before = (zoo / "convnet" / "backbone.safetensors").stat().st_mtime_ns
    assert train(arguments) == 0
    assert [*manifest(zoo)] == ["convnet", "second"]
    assert (zoo / "convnet" / "backbone.safetensors").stat().st_mtime_ns == before
    assert len(list((zoo / "second" / "logs").glob("version_*"))) == 2, "the second process resumed"


def test_a_member_finished_before_its_entry_is_not_trained_again(zoo: Path, config: str) -> None:
    content, expected = json.loads((zoo / "zoo.json").read_text()), manifest(zoo)
    del content["members"]["convnet"]
    (zoo / "zoo.json").write_text(json.dumps(content))
    before = (zoo / "convnet" / "backbone.safetensors").stat().st_mtime_ns
    assert train(["zoo", "--config", config, "--out", str(zoo)]) == 0
    assert (zoo / "convnet" / "backbone.safetensors").stat().st_mtime_ns == before
    assert manifest(zoo) == expected


def test_where_the_data_are_does_not_change_the_settings() -> None:
    member = ZooMember(config="lenet_mnist")
    here, there = _training(member, None), _training(member, Path("elsewhere"))
    assert (here["data"]["init_args"]["root"], there["data"]["init_args"]["root"]) == ("data", "elsewhere")
    own = _training(ZooMember(config="convnet_digits"), Path("elsewhere"))
    assert "elsewhere" not in json.dumps(own)


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "zoo").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_zoo_is_valid(path: Path) -> None:
    members = {name: ZooMember(**own) for name, own in yaml.safe_load(path.read_text())["members"].items()}
    for member in ZooSettings(members=members).members.values():
        shipped = yaml.safe_load(find_configuration(member.config, "train").read_text())
        own = _training(member, None)
        assert own["epochs"] == member.settings.get("epochs", shipped["epochs"])
    assert path.read_text().startswith("# ")


BAD = {
    "a name that is no member's": (
        ["--only", "[convnet,resnet]"],
        "only must name some of threads, convnet, generator; got",
    ),
    "all members anew": (["--overwrite", "true"], "overwrite trains one member again"),
    "a verification that trains": (
        ["--verify", "true", "--only", "[convnet]", "--overwrite", "true"],
        "nothing is trained by verify",
    ),
    "a zoo that is not there": (["--verify", "true", "--out", "nowhere"], "zoo.json lists no members"),
    "a member that is not there": (["--verify", "true", "--only", "[resnet]"], "zoo.json lists no resnet"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused(case: str, made: Path, config: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, expected = BAD[case]
    assert expected in refused(capsys, "--config", config, "--out", made, *arguments)


@pytest.mark.parametrize(
    ("member", "expected"),
    [
        ({"config": "convnet_digits", "settings": {"epoch": 1}}, "epoch"),
        ({"config": "convnet_digits", "settings": {"epochs": -1}}, "epochs"),
        ({"config": "no_such_file"}, "there is no configuration no_such_file"),
        ({"config": "convnet_digits", "command": "shadows"}, "command"),
    ],
)
def test_a_member_that_cannot_be_trained_is_refused_before_any_training(
    member: dict[str, object], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump({"members": {"a": MEMBERS["convnet"], "b": member}}))
    assert expected in refused(capsys, "--config", path, "--out", tmp_path / "zoo")
    assert not (tmp_path / "zoo").exists()


def test_a_name_is_that_of_a_folder() -> None:
    with pytest.raises(ConfigError, match=r"got '\.\./up'"):
        ZooSettings(members={"../up": ZooMember(config="convnet_digits")})


@pytest.mark.parametrize("content", ["[]", "{", '{"members": {"convnet": {"file": "x"}}}', "{}"])
def test_a_damaged_manifest_is_refused(
    content: str, zoo: Path, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (zoo / "zoo.json").write_text(content)
    assert f"{zoo / 'zoo.json'}" in refused(capsys, "--config", config, "--out", zoo)
    assert (zoo / "zoo.json").read_text() == content


def test_torchrun_is_refused(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "start it without torchrun" in refused(capsys, "--config", config, "--out", tmp_path / "zoo")


def test_an_attack_takes_a_member(made: Path, tmp_path: Path) -> None:
    short = ["--victims.n", "1", "--attack.steps", "2", "--attack.restarts", "1", "--out", str(tmp_path / "run")]
    checkpoint = str(made / "convnet" / "backbone.safetensors")
    assert attack(["run", "--config", "demo_digits", "--backbone.checkpoint", checkpoint, *short]) == 0
    assert json.loads((tmp_path / "run" / "metrics.json").read_text())["backbone"] == checkpoint
