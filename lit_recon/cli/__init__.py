"""The command line: `attack.py`, `train.py`, `reconn.py`, and `lit-recon` in front of the three."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lit_recon import __version__
from lit_recon.cli.entry import CONSOLE, Command, main, named_by_content, refuse, unknown, usage

_ROOM = "lit_recon.experiments"
_COMMANDS = {
    "attack": [
        Command("run", "attack clients' updates and score the reconstructions", f"{_ROOM}.update_attack.run", "attack"),
        Command(
            "evaluate", "rank defenses by the strongest attack at equal utility", f"{_ROOM}.evaluate.run", "evaluate"
        ),
        Command("audit", "find out what an update of your own system gives away", f"{_ROOM}.audit.run", "audit"),
        Command("bounds", "compare attacks on two-layer networks with bounds", f"{_ROOM}.two_layer.run", "bounds"),
        Command("trainset", "reconstruct training sets from weights", f"{_ROOM}.trainset.run", "trainset"),
        Command("report", "build a run's page again, or compare several runs", "lit_recon.cli.report"),
    ],
    "train": [
        Command("backbone", "train a classifier to be attacked", f"{_ROOM}.train.backbone", "train"),
        Command("shadows", "train the shadow models of an informed adversary", f"{_ROOM}.train.shadows", "reconn"),
        Command("generator", "train a generator of images, a prior of attacks", f"{_ROOM}.train.generator", "train"),
        Command("zoo", "train several checkpoints, with their hashes, or verify them", f"{_ROOM}.train.zoo", "zoo"),
    ],
    "reconn": [
        Command("run", "reconstruct the unknown image of released models", f"{_ROOM}.released_attack.run", "reconn"),
        Command("factors", "vary one factor at a time; so does `run` with factors", f"{_ROOM}.factors.run", "reconn"),
        Command("glm", "reconstruct records of linear models by their closed form", f"{_ROOM}.glm.run", "reconn"),
        Command("membership", "infer which of two candidates was trained on", f"{_ROOM}.membership.run", "reconn"),
        Command("rero", "compare attacks with bounds under differential privacy", f"{_ROOM}.rero.run", "reconn"),
    ],
}


def attack(arguments: Sequence[str] | None = None, program: str = "python attack.py") -> int:
    """Run `attack.py` and return its exit code."""
    return main(program, _COMMANDS["attack"], arguments)


def train(arguments: Sequence[str] | None = None, program: str = "python train.py") -> int:
    """Run `train.py` and return its exit code."""
    return main(program, _COMMANDS["train"], arguments)


def reconn(arguments: Sequence[str] | None = None, program: str = "python reconn.py") -> int:
    """Run `reconn.py` and return its exit code."""
    return main(program, _COMMANDS["reconn"], named_by_content(sys.argv[1:] if arguments is None else arguments))


def console(arguments: Sequence[str] | None = None) -> int:
    """Run `lit-recon attack`, `lit-recon train` or `lit-recon reconn` and return its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    scripts = {"attack": attack, "train": train, "reconn": reconn}
    if given and given[0] in scripts:
        return scripts[given[0]](given[1:], f"{CONSOLE} {given[0]}")
    if given == ["--version"]:
        print(f"{CONSOLE} {__version__}")
        return 0
    if given and given[0] not in ("-h", "--help"):
        return refuse(CONSOLE, unknown(CONSOLE, given[0], list(scripts)), f"{CONSOLE} --help")
    listed = [Command(name, ", ".join(each.name for each in commands), "") for name, commands in _COMMANDS.items()]
    print(usage(f"{CONSOLE} SCRIPT COMMAND [--help] [--config NAME] [--KEY VALUE ...]", listed))
    return 0 if given else 2
