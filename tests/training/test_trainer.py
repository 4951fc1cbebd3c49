"""Trainers refuse what is not there in one line, and count processes as torchrun does."""

from __future__ import annotations

import pytest
import torch

from lit_recon.errors import ConfigError
from lit_recon.training.trainer import TrainerSettings, _processes, build_trainer, is_first_process


@pytest.mark.parametrize("settings", [{"devices": 0}, {"num_nodes": 0}, {"threads": 0}])
def test_counts_below_one_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        TrainerSettings(**settings)  # type: ignore[arg-type]  # parametrised


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_missing_device_is_a_setting_that_is_wrong() -> None:
    with pytest.raises(ConfigError, match="gpu"):
        build_trainer(TrainerSettings(accelerator="gpu"), [])


def test_alone_the_settings_count() -> None:
    assert _processes(TrainerSettings(devices=3, num_nodes=2)) == (3, 2)


def test_under_torchrun_its_processes_count(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    assert _processes(TrainerSettings(devices=1)) == (4, 2)


def test_threads_are_set() -> None:
    before = torch.get_num_threads()
    build_trainer(TrainerSettings(accelerator="cpu", threads=before + 1), [])
    assert torch.get_num_threads() == before + 1
    torch.set_num_threads(before)
    build_trainer(TrainerSettings(accelerator="cpu"), [])
    assert torch.get_num_threads() == before


def test_a_trainer_keeps_no_checkpoints_and_draws_no_bar() -> None:
    trainer = build_trainer(TrainerSettings(accelerator="cpu"), [])
    assert trainer.checkpoint_callback is None
    assert trainer.progress_bar_callback is None
    assert is_first_process()
