"""Record an update in a training loop, audit it, and build its page again."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from lit_recon.clients.record import RecordedUpdate, Recorder
from lit_recon.experiments.audit import attacks
from tests.experiments.audit.updates import images, labels, mlp

MODEL = [
    *("--model.class_path", "tests.experiments.audit.updates.mlp", "--model.image_shape", "[1, 8, 8]"),
    *("--model.normalization", "{mean: [0.5], std: [0.25]}", "--attacks", "[analytic]", "--minutes", "1"),
    *("--trainer.accelerator", "cpu", "--wandb.mode", "disabled", "--protection_minutes", "0"),
]


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """What a user's loop writes by three lines."""
    model = mlp()
    recorder = Recorder(model, batch_size=1, lr=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    nn.functional.cross_entropy(model((images(1) - 0.5) / 0.25), labels(1)).backward()
    optimizer.step()
    return recorder.save(tmp_path / "update.safetensors", model, images=images(1), labels=labels(1))


def test_a_recorded_update_is_audited(recorded: Path, attack: Callable[..., Any], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    ended = attack("audit", *MODEL, "--record", recorded, "--out", folder)
    assert ended.code == 0, ended.err
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["rmse"] < 1e-3
    assert ended.out.splitlines()[-1].split() == ["report", str(folder / "report.html")]
    page = (folder / "report.html").read_bytes()
    (folder / "report.html").unlink()
    assert attack("report", folder).code == 0
    assert (folder / "report.html").read_bytes() == page
    assert not (folder / "report.pdf").exists()


def test_a_killed_audit_goes_on_with_other_minutes_but_not_with_another_update(
    recorded: Path, attack: Callable[..., Any], tmp_path: Path
) -> None:
    how = [*MODEL, "--record", recorded, "--out", tmp_path / "run"]
    assert attack("audit", *how).code == 0
    (tmp_path / "run" / "metrics.json").unlink()  # as if it had been killed before
    assert attack("audit", *how, "--minutes", "2", "--protection_minutes", "0.1").code == 0
    (tmp_path / "run" / "metrics.json").unlink()
    update = RecordedUpdate.load(recorded)
    replace(update, before={name: value + 0.01 for name, value in update.before.items()}).save(recorded)
    ended = attack("audit", *how)
    assert ended.code == 2
    assert "must be the outcome of an attack on this update" in ended.err
    assert not (tmp_path / "run" / "metrics.json").exists()


def test_an_audit_that_has_ended_goes_on_with_more_minutes(
    recorded: Path, attack: Callable[..., Any], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    how = [*MODEL, "--record", recorded, "--out", folder]
    assert attack("audit", *how).code == 0
    assert not json.loads((folder / "audit.json").read_text())["protection"]
    for same in ([], ["--minutes", "0.5"]):
        ended = attack("audit", *how, *same)
        assert ended.code == 2
        assert "holds a finished run" in ended.err
    assert attack("audit", *how, "--protection_minutes", "0.1").code == 0
    assert json.loads((folder / "audit.json").read_text())["protection"]


@pytest.mark.parametrize("behind", ["no defense", "defenses"])
def test_an_audit_whose_attacks_lacked_memory_goes_on_by_the_same_command(
    behind: str, recorded: Path, attack: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, build, built = tmp_path / "run", attacks.Candidate.build, []

    def short(*how: Any) -> Any:
        built.append(how)
        if behind == "no defense" or len(built) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return build(*how)

    how = [*MODEL, "--protection_minutes", "0.1", "--record", recorded, "--out", folder]
    monkeypatch.setattr(attacks.Candidate, "build", short)
    ended = attack("audit", *how)
    assert ended.code == 0, ended.err
    assert "not enough memory (CUDA out of memory)" in ended.out
    assert "not enough memory (CUDA out of memory)" in (folder / "report.html").read_text(encoding="utf-8")
    monkeypatch.setattr(attacks.Candidate, "build", build)
    assert attack("audit", *how).code == 0
    content = json.loads((folder / "audit.json").read_text(encoding="utf-8"))
    assert content["attacks"][0]["certified"] == 1
    assert all(own["stopped"] is not None for own in content["protection"])
    assert "holds a finished run" in attack("audit", *how).err


def test_more_minutes_for_another_update_leave_the_run_finished(
    recorded: Path, attack: Callable[..., Any], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    how = [*MODEL, "--record", recorded, "--out", folder]
    assert attack("audit", *how).code == 0
    update = RecordedUpdate.load(recorded)
    replace(update, before={name: value + 0.01 for name, value in update.before.items()}).save(recorded)
    ended = attack("audit", *how, "--minutes", "2")
    assert ended.code == 2
    assert "must be the outcome of an attack on this update" in ended.err
    assert (folder / "metrics.json").exists()


@pytest.fixture
def printer() -> None:
    try:
        import weasyprint  # noqa: F401
    except (ImportError, OSError) as error:
        pytest.skip(f"needs lit_recon[pdf] and the system library Pango: {error}")


@pytest.mark.usefixtures("printer")
def test_the_report_as_a_pdf(recorded: Path, attack: Callable[..., Any], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    ended = attack("audit", *MODEL, "--record", recorded, "--out", folder, "--pdf", "true")
    assert ended.code == 0, ended.err
    path = folder / "report.pdf"
    assert ended.out.splitlines()[-1].split() == ["PDF", str(path)]
    assert path.read_bytes().startswith(b"%PDF")
    path.unlink()
    assert attack("report", folder, "--pdf").code == 0
    assert path.read_bytes().startswith(b"%PDF")


def test_without_the_printer_the_page_is_there(
    recorded: Path, attack: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "weasyprint", None)
    ended = attack("audit", *MODEL, "--record", recorded, "--out", tmp_path / "run", "--pdf", "true")
    assert ended.code == 2
    assert "pip install 'lit_recon[pdf]'" in ended.err
    assert (tmp_path / "run" / "report.html").is_file()


def test_a_model_of_torch_export_does_as_well(recorded: Path, attack: Callable[..., Any], tmp_path: Path) -> None:
    program = torch.export.export(mlp(), (images(2),), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    torch.export.save(program, tmp_path / "model.pt2")
    how = [
        *("--model.class_path", "lit_recon.models.exported.read_exported"),
        *("--model.init_args.path", tmp_path / "model.pt2", "--record", recorded, "--out", tmp_path / "run"),
    ]
    ended = attack("audit", *how, *MODEL[4:])  # the file knows the shape of images
    assert ended.code == 0, ended.err
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["rmse"] < 1e-3


def test_a_batch_size_that_is_not_known_is_refused_before_a_folder_is_made(
    recorded: Path, attack: Callable[..., Any], tmp_path: Path
) -> None:
    update = RecordedUpdate.load(recorded)
    replace(update, known=replace(update.known, batch_size=None)).save(tmp_path / "unknown.safetensors")
    ended = attack("audit", *MODEL, "--record", tmp_path / "unknown.safetensors", "--out", tmp_path / "run")
    assert ended.code == 2
    assert "batch_size is not known" in ended.err
    assert not (tmp_path / "run").exists()


def test_separate_files_do_as_well(attack: Callable[..., Any], tmp_path: Path) -> None:
    model = mlp()
    torch.save(model.state_dict(), tmp_path / "before.pt")
    nn.functional.cross_entropy(model((images(1) - 0.5) / 0.25), labels(1)).backward()
    gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    save_file(gradients, tmp_path / "gradient.safetensors")
    files = ["--before", tmp_path / "before.pt", "--sent", tmp_path / "gradient.safetensors", "--form", "gradient"]
    ended = attack("audit", *MODEL, *files, "--batch_size", "1", "--out", tmp_path / "run")
    assert ended.code == 0, ended.err
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["rmse"] is None
    assert metrics["rmse_reason"] == "the true images were not given"
    assert metrics["distance"] < 1e-6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--model.init_args", "{seed: 0, width: 3}"], "change model.init_args"),
        (["--model.image_shape", "[1, 9, 9]"], "give a module that takes images"),
        (["--minutes", "0"], "minutes must be above 0"),
        (["--batches", "3"], "steps must be at least batches"),
        (["--attacks", "[magic]"], "attacks must be among analytic"),
        (["--model.weights", "w.pt"], "give w.pt as before, or leave it out"),
        (["--defense", "GaussianNoise"], "changes nothing: set its std"),
    ],
)
def test_bad_input_is_refused_before_a_run_folder_is_made(
    changes: list[str], message: str, recorded: Path, attack: Callable[..., Any], tmp_path: Path
) -> None:
    ended = attack("audit", *MODEL, "--record", recorded, *changes, "--out", tmp_path / "run")
    assert ended.code != 0
    assert message in ended.err
    assert len(ended.err.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_a_model_is_asked_for(recorded: Path, attack: Callable[..., Any], tmp_path: Path) -> None:
    ended = attack("audit", "--record", recorded, "--out", tmp_path / "run")
    assert ended.code != 0
    assert "model.class_path is missing" in ended.err
