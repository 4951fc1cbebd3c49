"""No attack can know its score: import-linter's contracts hold for every module of every attack package."""

from __future__ import annotations

import ast
import copy
from pathlib import Path
from typing import Any

import grimp
import pytest
from importlinter.api import read_configuration
from importlinter.contracts.forbidden import ForbiddenContract
from importlinter.contracts.independence import IndependenceContract

from lit_recon.metrics import perceptual

ROOT = Path(__file__).parents[2]
ATTACKS, METRICS = "lit_recon.attacks", "lit_recon.metrics"
#: The one exception: LPIPS as a training loss, on images that the adversary holds.
TRAINING_LOSS = "lit_recon.attacks.released.networks.convolutional"
KINDS = {"independence": IndependenceContract, "forbidden": ForbiddenContract}


@pytest.fixture(scope="module")
def contracts() -> list[IndependenceContract | ForbiddenContract]:
    """The contracts of pyproject.toml whose subject are attacks."""
    options = read_configuration(str(ROOT / "pyproject.toml"))
    chosen = [one for one in options["contracts_options"] if one["name"].startswith("An attack ")]
    assert len(chosen) == 3
    return [KINDS[one["type"]](one["name"], options["session_options"], one) for one in chosen]


@pytest.fixture(scope="module")
def graph() -> Any:
    return grimp.build_graph("lit_recon", include_external_packages=True, cache_dir=None)


def reported(contracts: list[IndependenceContract | ForbiddenContract], graph: Any) -> set[str]:
    """The attack modules at whose imports a contract is broken."""
    found: set[str] = set()
    for contract in contracts:
        for invalid in contract.check(copy.deepcopy(graph), verbose=False).metadata["invalid_chains"]:
            for chain in invalid["chains"]:
                links = chain if isinstance(chain, list) else chain["chain"] + chain["extra_firsts"]
                found |= {link["importer"] for link in links}
    return found


def modules_of(graph: Any, package: str) -> set[str]:
    return {package, *graph.find_descendants(package)}


def test_the_package_keeps_the_contracts(contracts: list[Any], graph: Any) -> None:
    assert len(modules_of(graph, ATTACKS)) > 60
    assert reported(contracts, graph) == set()


@pytest.mark.parametrize("score", ["every module", METRICS, "lit_recon", "torchmetrics", "lpips", "skimage"])
def test_no_attack_may_import_a_score(contracts: list[Any], graph: Any, score: str) -> None:
    attacks = modules_of(graph, ATTACKS)
    scores = modules_of(graph, METRICS) - {METRICS} if score == "every module" else {score}
    for name in sorted(scores):
        changed = copy.deepcopy(graph)
        if name not in changed.modules:
            changed.add_module(name, is_squashed=True)
        for module in attacks:
            changed.add_import(importer=module, imported=name, line_number=1, line_contents=f"import {name}")
        excepted = {TRAINING_LOSS} if name == perceptual.__name__ else set()
        assert attacks - reported(contracts, changed) == excepted


def test_the_exception_takes_no_more_than_a_training_loss() -> None:
    path = ROOT.joinpath(*TRAINING_LOSS.split(".")).with_suffix(".py")
    taken = {
        alias.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(METRICS)
        for alias in node.names
    }
    assert taken == {"Lpips", "LpipsNetwork", "Unavailable", "load_lpips"}
