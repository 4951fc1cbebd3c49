"""Every command that computes results, at a size of seconds, on digits that come with scikit-learn."""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from lit_recon.clients.record import Recorder
from lit_recon.experiments.engine.pieces import merged
from tests.experiments.audit.updates import images, labels, mlp
from tests.processes import Script, outputs

ROOT = Path(__file__).parents[2]
#: The run folder, below the folder that a command is started in.
OUT = "runs/run"
_DIGITS: dict[str, Any] = {"class_path": "Digits"}
_QUIET: dict[str, Any] = {"trainer": {"accelerator": "cpu", "threads": 1}, "wandb": {"mode": "disabled"}}
_NO_LPIPS: dict[str, Any] = {"lpips": {"network": "none"}}


@dataclass(frozen=True)
class Case:
    """A command with its settings.

    Args:
        name: of the case.
        script: `attack.py`, `train.py` or `reconn.py`.
        command: of the script.
        settings: nested, as in a configuration file.
        prepare: writes further files that the command reads into its folder.
        has_run_folder: whether the command writes a run folder; `train.py shadows` writes a store alone.
        has_page: whether it writes a page.
        arguments: in the place of the settings' file and the run folder.
    """

    name: str
    script: str
    command: str
    settings: Mapping[str, Any]
    prepare: Callable[[Path], None] = lambda place: None
    has_run_folder: bool = True
    has_page: bool = True
    arguments: Sequence[str] = ()

    def write(self, place: Path) -> list[str]:
        """Make a folder in which the command can be started; the script and its arguments."""
        place.mkdir(parents=True)
        (place / "settings.yaml").write_text(yaml.safe_dump(dict(self.settings), sort_keys=False))
        self.prepare(place)
        out = ["--out", OUT] if self.has_run_folder else []
        return [str(ROOT / self.script), self.command, *(self.arguments or ("--config", "settings.yaml", *out))]


def _record_update(place: Path) -> None:
    model = mlp()
    recorder = Recorder(model, batch_size=1, lr=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    nn.functional.cross_entropy(model((images(1) - 0.5) / 0.25), labels(1)).backward()
    optimizer.step()
    recorder.save(place / "update.safetensors", model, images=images(1), labels=labels(1))


_MLP = {"class_path": "MLP", "init_args": {"hidden": [16]}}
_BACKBONE = {"trunk": _MLP, "epochs": 1, "padding": 1, "flip": False, "n_train": 400}
_TRAINING = {"data": _DIGITS, "n_train": 400, "batch_size": 50, "padding": 1, "flip": False, **_QUIET}
_MATCHING = {
    "class_path": "GradientMatching",
    "init_args": {"steps": 60, "restarts": 1, "solver": {"class_path": "Adam", "init_args": {"signed": True}}},
}
_ATTACK = {
    "data": _DIGITS,
    "backbone": _BACKBONE,
    "client": {"batch_norm": "eval"},
    "victims": {"n": 3, "batch_size": 1, "pool": "all"},
    "attack": _MATCHING,
    # one victim at a time: which way of computing several is the fastest is measured, and ways round differently
    "clients_per_batch": 1,
    "save_every_seconds": 0.02,
    **_NO_LPIPS,
    **_QUIET,
}
_SHADOWS = {
    "data": _DIGITS,
    "split": {"fixed": 60, "shadow": 90, "targets": 12, "pool": "all"},
    "network": {"class_path": "ReleasedMLP", "init_args": {"hidden": [10], "activation": "elu"}},
    "descent": {"steps": 20, "lr": 0.2, "momentum": 0.9},
    "execution": "batched_mlp",
    "shard_size": 16,
    "cache": "cache",
    "trainer": _QUIET["trainer"],
}
_RELEASED = {**_SHADOWS, **_QUIET}
_FACTORS = {
    **{key: value for key, value in _RELEASED.items() if key != "shard_size"},
    "test_images": 300,
    "gradient_targets": 4,
    "gradient_steps": 2,
    "factors": {
        "shadows": {"setting": "split.shadow", "values": [30, 90]},
        "activation": {
            "setting": "network.init_args.activation",
            "values": ["elu", "relu"],
            "measures": ["gradients", "embedding"],
        },
    },
}
_RERO = {
    **{key: value for key, value in _RELEASED.items() if key != "shard_size"},
    "test_images": 300,
    "budget": {"epsilons": [10]},
    "prior": {"candidates": [2, 5], "samples": 200, "thresholds": [0.01]},
    "sampled": None,
}
_MEMBERSHIP = {
    **{key: value for key, value in _RELEASED.items() if key not in ("shard_size", "cache")},
    "split": {"fixed": 60, "shadow": 80, "targets": 12, "pool": "all"},
    "adversary_execution": "loop",
    "histogram": {"images": 2, "models": 6},
}
_EVALUATION = {
    "data": _DIGITS,
    "backbone": _BACKBONE,
    "victims": {"n": 2, "pool": "all"},
    "attacks": {
        "matching": {
            "config": str(ROOT / "configs" / "attack" / "demo_digits.yaml"),
            "settings": {"attack": {"init_args": {"steps": 40, "restarts": 1}}, "clients_per_batch": 1},
        }
    },
    "defenses": {
        "noise": {
            "strength": "defense.init_args.std",
            "values": [0.01],
            "settings": {"defense": {"class_path": "GaussianNoise"}},
        }
    },
    "utility": {"epochs": 1},
    **_NO_LPIPS,
    **_QUIET,
}
_AUDIT = {
    "model": {
        "class_path": "tests.experiments.audit.updates.mlp",
        "image_shape": [1, 8, 8],
        "normalization": {"mean": [0.5], "std": [0.25]},
    },
    "record": "update.safetensors",
    "attacks": ["analytic"],
    "minutes": 1,
    "protection_minutes": 0,
    **_QUIET,
}
_TRAINSET = merged(
    yaml.safe_load((ROOT / "configs" / "trainset" / "demo_digits.yaml").read_text()),
    {
        "examples": {"per_class": 2},
        "network": {"init_args": {"hidden": [50]}},
        "known": {"start": False},
        "save_every_seconds": 0.02,
        "wandb": _QUIET["wandb"],
    },
) | {"attacks": {"kkt": {"class_path": "MarginKKT", "init_args": {"steps": 30}}}}
_GENERATOR = {
    "data": _DIGITS,
    "n_train": 300,
    "latent_size": 8,
    "width": 8,
    "critic_width": 8,
    "recipe": {"adversarial": 0.02, "pixel_noise": 0.1, "average": 0.99},
    "epochs": 3,
    "n_shown": 4,
    "search_steps": 20,
    **_QUIET,
}
_BOUNDS = {
    "base": {"d": 6, "m": 200, "batch": 1, "noise": 0.03},
    "sweeps": {"d": [4], "m": [100]},
    "defenses": {"pruning": {"defense": {"class_path": "GradientPruning"}, "values": [0.5], "rate": "pruning"}},
    "attacks": {
        "tensor": {"recovery": {"class_path": "MomentRecovery"}},
        "exact": {"recovery": {"class_path": "ExactRecovery"}, "released": "head"},
    },
    "repeats": 2,
    "threads": 1,
    "wandb": _QUIET["wandb"],
}
_GLM = {
    "data": _DIGITS,
    "split": {"records": 200, "targets": 12, "held_out": 100, "pool": "all"},
    "regression": {"class_path": "LeastSquares"},
    "beside": {"counts": {"class_path": "Counts"}},
    "wandb": _QUIET["wandb"],
}
_ZOO = {
    "members": {
        "convnet": {"config": "convnet_digits", "settings": {"epochs": 2, "n_train": 200, **_QUIET}},
        "generator": {"command": "generator", "config": "settings_of_generator.yaml", "settings": {"epochs": 2}},
    }
}


def _write_generator(place: Path) -> None:
    (place / "settings_of_generator.yaml").write_text(yaml.safe_dump(_GENERATOR))


@functools.cache
def _finished() -> Path:
    """A folder with a finished run."""
    place = Path(tempfile.mkdtemp(prefix="finished-"))
    script, *arguments = CASES["glm"].write(place / "place")
    outputs([Script(Path(script), *arguments, cwd=place / "place")])
    (place / "place" / OUT / "report.html").unlink()
    return place / "place" / "runs"


def _copy_finished(place: Path) -> None:
    shutil.copytree(_finished(), place / "runs")


CASES = {
    case.name: case
    for case in (
        Case(
            "backbone",
            "train.py",
            "backbone",
            {**_TRAINING, "trunk": {"class_path": "ConvNet"}, "epochs": 3},
            has_page=False,
        ),
        Case(
            "backbone, DP",
            "train.py",
            "backbone",
            {
                **_TRAINING,
                "trunk": _MLP,
                "epochs": 3,
                "dp": {"max_grad_norm": 1.0, "target_epsilon": 8.0, "delta": 1e-4},
            },
            has_page=False,
        ),
        Case("generator", "train.py", "generator", _GENERATOR),
        Case("shadows, exact", "train.py", "shadows", _SHADOWS, has_run_folder=False, has_page=False),
        Case(
            "shadows, linear",
            "train.py",
            "shadows",
            {**_SHADOWS, "shadows": "linear", "linear": {"sample": 8, "hessian_images": 60, "tolerance": 1.0}},
            has_run_folder=False,
            has_page=False,
        ),
        Case("attack run", "attack.py", "run", _ATTACK),
        Case("evaluate", "attack.py", "evaluate", _EVALUATION),
        Case("audit", "attack.py", "audit", _AUDIT, _record_update),
        Case("reconn run", "reconn.py", "run", _RELEASED),
        Case("factors", "reconn.py", "factors", _FACTORS),
        Case("rero", "reconn.py", "rero", _RERO),
        Case("membership", "reconn.py", "membership", _MEMBERSHIP),
        Case("trainset", "attack.py", "trainset", _TRAINSET),
        Case("bounds", "attack.py", "bounds", _BOUNDS),
        Case("glm", "reconn.py", "glm", _GLM),
        Case("zoo", "train.py", "zoo", _ZOO, _write_generator, has_page=False),
        Case("report", "attack.py", "report", {}, _copy_finished, has_run_folder=False, arguments=[OUT]),
    )
}
