"""A small evaluation for journeys, and what it leaves."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from lit_recon.reporting.run_folder import RunFolder

ROOT = Path(__file__).parents[2]
Run = Callable[..., Any]


def write_grid(workplace: Path) -> Path:
    """Two defenses against one attack, with a network that trains in a second."""
    attack = attack_file("demo_digits")
    steps = {"attack": {"init_args": {"steps": 40, "restarts": 1}}}
    content = {
        "name": "tiny",
        "backbone": {
            "trunk": {"class_path": "MLP", "init_args": {"hidden": [16]}},
            "epochs": 1,
            "padding": 1,
            "flip": False,
        },
        "victims": {"n": 2, "pool": "all"},
        "attacks": {"geiping2020": {"config": attack, "settings": steps}},
        "defenses": {
            "noise": {
                "strength": "defense.init_args.std",
                "values": [0.01, 0.1],
                "settings": {"defense": {"class_path": "GaussianNoise"}},
            },
            "local": {"strength": "client.local_steps.steps", "values": [2], "settings": {}},
        },
        "utility": {"epochs": 1},
        "trainer": {"threads": 1},
        "lpips": {"network": "none"},
    }
    return written(workplace, "tiny", content)[0]


def written(workplace: Path, name: str, content: dict[str, Any]) -> tuple[Path, Path]:
    """The file with these settings, and a folder of its own for the run."""
    config = workplace / f"{name}.yaml"
    config.write_text(yaml.safe_dump(content, sort_keys=False))
    return config, workplace / "runs" / name


def figures(folder: Path) -> list[dict[str, str]]:
    """The table without what it cost to make."""
    with RunFolder(folder).table.open() as file:
        return [{name: cell for name, cell in row.items() if name != "seconds"} for row in csv.DictReader(file)]


def attack_file(name: str) -> str:
    return str(ROOT / "configs" / "attack" / f"{name}.yaml")
