"""From one command to a page about a reconstructed training set; killed and resumed on the way."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SMALL = [
    *("--config", ROOT / "configs" / "trainset" / "demo_digits.yaml", "--examples.per_class", 2),
    *("--attacks", '{"kkt": {"class_path": "MarginKKT", "init_args": {"steps": 30}}}', "--known.start", "false"),
    *("--network.init_args.hidden", "[50]", "--seeds.restarts", 2, "--save_every_seconds", 0.02),
    *("--wandb.mode", "disabled"),
]


def contents(folder: Path) -> dict[str, Any]:
    """All results but times."""
    [cell] = folder.glob("cells/*")
    found = json.loads((cell / "results.json").read_text())
    for entry in (found, found["model"], *found["restarts"]):
        entry.pop("seconds")
    found.pop("attack_seconds")
    return {"results": found, "images": (cell / "reconstructions.safetensors").read_bytes()}


def test_killed_and_resumed_ends_as_if_it_had_been_left_alone(
    workplace: Path, script: Callable[..., subprocess.Popen[str]], attack: Callable[..., Any]
) -> None:
    whole, broken = workplace / "runs" / "trainset_whole", workplace / "runs" / "trainset_broken"
    ended = attack("trainset", *SMALL, "--out", whole)
    assert ended.code == 0, ended.err
    assert "Closest without the truth in its start: kkt from noise" in ended.out

    at = ("cells/*/restart_0.pt", signal.SIGKILL)
    killed = script("attack.py", "trainset", *SMALL, "--out", broken, signalled=at)
    _, err = killed.communicate(timeout=60)
    assert killed.returncode == -signal.SIGKILL, err
    assert list(broken.glob("cells/*/restart_0.pt"))
    assert not list(broken.glob("cells/*/*.safetensors"))

    assert attack("trainset", *SMALL, "--out", broken).code == 0
    assert contents(broken) == contents(whole)
    assert not list(broken.glob("cells/*/*.pt"))


def test_the_page_can_be_built_again_and_a_finished_study_is_kept(workplace: Path, attack: Callable[..., Any]) -> None:
    folder = workplace / "runs" / "trainset_whole"
    page = (folder / "report.html").read_text()
    assert "Nearest neighbors" in page
    assert page.count("data:image/png;base64,") == 1
    assert not re.findall(r'(?:src|href)="(?!data:|#)[^"]*"', page)
    (folder / "report.html").unlink()
    assert attack("report", folder).code == 0
    assert (folder / "report.html").read_text() == page
    ended = attack("trainset", *SMALL, "--out", folder)
    assert ended.code == 2
    assert "--overwrite true" in ended.err
    refused = attack("trainset", *SMALL, "--training.until", 0.5, "--out", workplace / "runs" / "trainset_refused")
    assert refused.code == 2
    assert refused.err.startswith("error: attacks.kkt, starts.noise: the condition of the largest margin holds")
    damaged = next(folder.glob("cells/*/results.json"))
    damaged.write_text("{")
    assert attack("report", folder).code == 2
