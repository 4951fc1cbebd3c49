"""CSV always; W&B by the mode that the settings, the environment and the account come to, and never a question."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from pytorch_lightning.loggers import CSVLogger

from lit_recon.errors import ConfigError
from lit_recon.modules.loggers import WandbSettings, build_loggers, finish, log_grid, log_numbers, log_table


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """No account and no wishes."""
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    return monkeypatch


@pytest.mark.parametrize(
    ("mode", "asked", "key", "expected"),
    [
        ("auto", None, False, "offline"),
        ("auto", None, True, "online"),
        ("auto", "offline", True, "offline"),
        ("auto", "dryrun", True, "offline"),
        ("auto", "disabled", True, "disabled"),
        ("offline", "online", True, "offline"),
        ("disabled", None, True, "disabled"),
        ("online", None, True, "online"),
    ],
)
def test_mode(environment: pytest.MonkeyPatch, mode: str, asked: str | None, key: bool, expected: str) -> None:
    if asked is not None:
        environment.setenv("WANDB_MODE", asked)
    if key:
        environment.setenv("WANDB_API_KEY", "0" * 40)
    assert WandbSettings(mode=mode).resolved_mode() == expected  # type: ignore[arg-type]  # parametrised


@pytest.mark.parametrize(("mode", "asked"), [("online", ""), ("auto", "online")])
def test_online_needs_an_account(environment: pytest.MonkeyPatch, mode: str, asked: str) -> None:
    environment.setenv("WANDB_MODE", asked)
    with pytest.raises(ConfigError, match="no API key"):
        WandbSettings(mode=mode).resolved_mode()  # type: ignore[arg-type]  # parametrised


def test_a_stored_login_counts(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password 0\n")
    assert WandbSettings().resolved_mode() == "online"


def test_every_process_of_a_run_gets_its_own_csv_file(tmp_path: Path) -> None:
    for loss in (2.0, 1.0):
        loggers = build_loggers(tmp_path / "logs", "run", WandbSettings(mode="disabled"), {})
        assert [type(logger) for logger in loggers] == [CSVLogger]
        loggers[0].log_metrics({"loss": loss}, step=3)
        log_grid(loggers, "victims", b"", step=3)
        loggers[0].save()
        finish(loggers)
    written = [path.read_text() for path in sorted(tmp_path.glob("logs/version_*/metrics.csv"))]
    assert written == ["loss,step\n2.0,3\n", "loss,step\n1.0,3\n"]


@pytest.mark.filterwarnings("ignore")  # W&B's own
def test_offline_runs_keep_losses_images_and_tables(tmp_path: Path, environment: pytest.MonkeyPatch) -> None:
    png = io.BytesIO()
    Image.new("L", (8, 8)).save(png, format="PNG")
    for _ in range(2):
        loggers = build_loggers(tmp_path / "logs", "run", WandbSettings(mode="offline"), {"seed": 7})
        for logger in loggers:
            logger.log_metrics({"loss": 0.5}, step=1)
        log_grid(loggers, "images", png.getvalue(), step=2)
        mixed = [[3, 0.25, None, 0.5], [4, None, 0.1, "0.1 to 0.2"]]  # a paper's value may be a number or a range
        log_table(loggers, "victims", ["id", "rmse", "bound", "paper"], mixed)
        finish(loggers)
    runs = sorted((tmp_path / "logs" / "wandb").glob("offline-run-*"))
    identity = (tmp_path / "logs" / "wandb_id.txt").read_text()
    assert runs
    assert all(run.name.endswith(identity) for run in runs)
    assert list(tmp_path.rglob("media/images/*.png"))
    table = json.loads(next(tmp_path.rglob("*.table.json")).read_text())
    assert table["columns"] == ["id", "rmse", "bound", "paper"]
    assert table["data"] == [[3, 0.25, None, "0.5"], [4, None, 0.1, "0.1 to 0.2"]]


@pytest.mark.filterwarnings("ignore")  # W&B's own
def test_a_service_started_elsewhere_does_not_take_the_records(tmp_path: Path, environment: pytest.MonkeyPatch) -> None:
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        environment.chdir(tmp_path / place)
        finish(build_loggers(Path("logs"), "run", WandbSettings(mode="offline"), {}))
        assert list((tmp_path / place).glob("logs/wandb/offline-run-*/*.wandb"))


class Service:
    """Stands for a W&B run whose service is gone after so many calls."""

    def __init__(self, calls: int) -> None:
        self.calls, self.got = calls, []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> None:
            if len(self.got) == self.calls:
                raise BrokenPipeError(32, "Broken pipe")
            self.got.append(name)

        return call


@pytest.mark.parametrize("calls", range(6))
def test_a_run_goes_on_without_a_service_that_has_died(
    calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    service, png = Service(calls), io.BytesIO()
    Image.new("L", (8, 8)).save(png, format="PNG")
    monkeypatch.setattr("wandb.init", lambda **_: service)
    loggers = build_loggers(tmp_path / "logs", "run", WandbSettings(mode="offline"), {})
    log_numbers(loggers, {"loss": 0.5}, step=1)
    log_grid(loggers, "images", png.getvalue(), step=2)
    log_table(loggers, "victims", ["id"], [[3]])
    finish(loggers)
    loggers[0].save()
    assert service.got == ["define_metric", "define_metric", "log", "log", "log", "finish"][:calls]
    said = capsys.readouterr().err.splitlines()
    assert said == ["W&B failed ([Errno 32] Broken pipe): the run goes on without it; its folder has all results"]
    assert "0.5,1" in next(tmp_path.glob("logs/version_*/metrics.csv")).read_text()
