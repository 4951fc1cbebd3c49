"""Trainers refuse what is not there in one line, and count processes as torchrun does."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from lightning_fabric.accelerators import MPSAccelerator

from lit_recon import experiments
from lit_recon.errors import ConfigError
from lit_recon.training import trainer as module
from lit_recon.training.trainer import (
    Placement,
    TrainerSettings,
    _processes,
    build_trainer,
    check_trainer,
    configure_process,
    is_first_process,
)

LOGGERS = [logging.getLogger(name) for name in ("pytorch_lightning", "lightning_fabric")]


def process_state() -> tuple[object, ...]:
    """What `configure_process` may change, as far as a process can be asked."""
    levels = [logger.level for logger in LOGGERS]
    return torch.get_num_threads(), torch.backends.cudnn.allow_tf32, list(warnings.filters), levels


@pytest.fixture
def unconfigured(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A process as PyTorch and Lightning leave it; gives the calls to the allocator."""
    told: list[str] = []
    monkeypatch.setattr(module, "keep_freed_memory", lambda: told.append("malloc"))
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    threads, levels = torch.get_num_threads(), [logger.level for logger in LOGGERS]
    for logger in LOGGERS:
        logger.setLevel(logging.INFO)
    yield told
    torch.set_num_threads(threads)
    for logger, level in zip(LOGGERS, levels, strict=True):
        logger.setLevel(level)


@pytest.mark.parametrize("settings", [{"devices": 0}, {"num_nodes": 0}, {"threads": 0}])
def test_counts_below_one_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        TrainerSettings(**settings)  # type: ignore[arg-type]  # parametrised


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_missing_device_is_a_setting_that_is_wrong() -> None:
    with pytest.raises(ConfigError, match="gpu"):
        check_trainer(TrainerSettings(accelerator="gpu"))
    with pytest.raises(ConfigError, match="gpu"):
        build_trainer(TrainerSettings(accelerator="gpu"), [])


def test_an_apple_gpu_does_not_compute_in_64_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MPSAccelerator, "is_available", lambda: True)
    assert check_trainer(TrainerSettings()).device == "mps:0"
    assert check_trainer(TrainerSettings(), float64=True) == Placement("cpu", 1)
    for accelerator in ("gpu", "mps"):
        with pytest.raises(ConfigError, match=f"accelerator={accelerator}: set trainer.accelerator to cpu"):
            build_trainer(TrainerSettings(accelerator=accelerator), [], float64=True)
    assert check_trainer(TrainerSettings(accelerator="cpu"), float64=True).device == "cpu"


def test_alone_the_settings_count() -> None:
    assert _processes(TrainerSettings(devices=3, num_nodes=2)) == (3, 2)


def test_under_torchrun_its_processes_count(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    assert _processes(TrainerSettings(devices=1)) == (4, 2)


def test_to_check_and_to_build_leave_the_process_alone(
    unconfigured: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    before = process_state()
    settings = TrainerSettings(accelerator="cpu", threads=torch.get_num_threads() + 1)
    assert check_trainer(settings) == Placement("cpu", 1)
    assert capsys.readouterr() == ("", "")
    build_trainer(settings, [])
    assert process_state() == before
    assert not unconfigured


def test_the_process_is_configured_once_for_all(unconfigured: list[str]) -> None:
    before = torch.get_num_threads()
    with warnings.catch_warnings():
        configure_process(TrainerSettings(threads=before + 1))
        warnings.warn("The 'test_dataloader' does not have many workers which may be a bottleneck", stacklevel=1)
    assert torch.get_num_threads() == before + 1
    assert not torch.backends.cudnn.allow_tf32
    assert {logger.level for logger in LOGGERS} == {logging.WARNING}
    assert unconfigured == ["malloc"]
    torch.set_num_threads(before)
    with warnings.catch_warnings():
        configure_process(TrainerSettings())
    assert torch.get_num_threads() == before


@pytest.mark.processes
def test_torchrun_sets_what_other_tests_set_in_its_place(tmp_path: Path) -> None:
    names = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID")
    script = tmp_path / "rank.py"
    # one write a line: the two processes share the pipe
    script.write_text(
        f"import os\nline = ' '.join(map(str, map(os.environ.get, {('RANK', 'LOCAL_RANK', *names)})))\n"
        "os.write(1, f'{line}\\n'.encode())\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    found = sorted(line.split() for line in said.splitlines())
    assert [line[:2] for line in found] == [["0", "0"], ["1", "1"]]
    for line in found:
        assert "None" not in line
        assert line[4:7] == ["2", "2", "0"]


def test_every_command_that_computes_configures_its_process() -> None:
    sources = {path: path.read_text() for path in Path(experiments.__file__).parent.rglob("*.py")}
    uses = re.compile(r"^def execute\(.*\b(build|check)_trainer\(", re.DOTALL | re.MULTILINE)
    computing = {path for path, text in sources.items() if uses.search(text)}
    assert len(computing) > 5
    assert {path for path in computing if "configure_process(" not in sources[path]} == set()


def test_a_trainer_keeps_no_checkpoints_and_draws_no_bar() -> None:
    trainer = build_trainer(TrainerSettings(accelerator="cpu"), [])
    assert trainer.checkpoint_callback is None
    assert trainer.progress_bar_callback is None
    assert is_first_process()


def test_16_bits_are_refused_on_processors_that_emulate_them(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = TrainerSettings(accelerator="cpu")
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    with pytest.raises(ConfigError, match="set precision to 32-true"):
        check_trainer(cpu, "bf16-mixed")
    assert check_trainer(cpu).device == "cpu"
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    assert check_trainer(cpu, "bf16-mixed").device == "cpu"
