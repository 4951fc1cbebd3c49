"""The commands behind the scripts: `attack.py`, `train.py` and `reconn.py`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lit_recon.cli.entry import Command, main, named_by_content


def attack(arguments: Sequence[str] | None = None) -> int:
    """Run `attack.py` and return its exit code."""
    commands = [
        Command("run", "attack clients' updates and score what comes back", "lit_recon.experiments.update_attack.run"),
        Command(
            "evaluate",
            "judge defenses by the strongest attack at equal utility",
            "lit_recon.experiments.evaluate.run",
        ),
        Command("bounds", "hold attacks on two-layer networks against bounds", "lit_recon.experiments.two_layer.run"),
        Command("report", "build a run's page again, or compare several runs", "lit_recon.cli.report"),
    ]
    return main("attack.py", commands, arguments)


def train(arguments: Sequence[str] | None = None) -> int:
    """Run `train.py` and return its exit code."""
    commands = [
        Command("backbone", "train a classifier to be attacked", "lit_recon.experiments.train.backbone"),
        Command("shadows", "train the shadow models of an informed adversary", "lit_recon.experiments.train.shadows"),
        Command(
            "generator",
            "train a generator of images, the prior of an attack",
            "lit_recon.experiments.train.generator",
        ),
    ]
    return main("train.py", commands, arguments)


def reconn(arguments: Sequence[str] | None = None) -> int:
    """Run `reconn.py` and return its exit code."""
    commands = [
        Command("run", "reconstruct the unknown image of released models", "lit_recon.experiments.released_attack.run"),
        Command(
            "factors",
            "vary one factor at a time; run leads here, given factors",
            "lit_recon.experiments.factors.run",
        ),
        Command("glm", "reconstruct records of linear models by their closed form", "lit_recon.experiments.glm.run"),
        Command("membership", "tell which of two candidates was trained on", "lit_recon.experiments.membership.run"),
        Command(
            "rero",
            "bound reconstruction under differential privacy, attacks beside it",
            "lit_recon.experiments.rero.run",
        ),
    ]
    return main("reconn.py", commands, named_by_content(sys.argv[1:] if arguments is None else arguments))
