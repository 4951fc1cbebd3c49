"""A class is an interface or a leaf: what others of ours derive from is abstract.

Errors form a family tree by nature, a defense's stages have identity defaults, and dataclasses of settings share
fields, which stay flat in a configuration: these are the exceptions.
"""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "lit_recon"
SETTINGS = (PACKAGE / "experiments" / "call.py", PACKAGE / "experiments" / "settings.py")
EXEMPT = (PACKAGE / "errors.py", PACKAGE / "defenses" / "base.py", *SETTINGS)


def last_name(expression: ast.expr) -> str:
    """`Attack` for `Attack`, `attack.Attack` and `Attack[Tensor]`."""
    if isinstance(expression, ast.Subscript):
        expression = expression.value
    return ast.unparse(expression).rsplit(".", 1)[-1]


def classes() -> dict[str, tuple[Path, ast.ClassDef]]:
    return {
        node.name: (path, node)
        for path in PACKAGE.rglob("*.py")
        if path not in EXEMPT
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }


def is_interface(node: ast.ClassDef) -> bool:
    """Whether a method is abstract; deriving from `ABC` alone leaves a class that can be built."""
    if "Protocol" in map(last_name, node.bases):
        return True
    methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
    return "abstractmethod" in [last_name(decorator) for method in methods for decorator in method.decorator_list]


def test_only_interfaces_are_derived_from() -> None:
    ours = classes()
    bases = {last_name(base): node.name for _, node in ours.values() for base in node.bases}
    concrete = [
        f"{derived} derives from {base} ({ours[base][0].relative_to(PACKAGE)})"
        for base, derived in sorted(bases.items())
        if base in ours and not is_interface(ours[base][1])
    ]
    assert not concrete, "wrap instead, or make the base abstract"


#: Interfaces whose leaves nobody outside their own package may tell apart.
INTERFACES = {"Attack", "SteppableAttack", "Defense", "Reconstructor", "FeatureRecovery", "Plan", "ModelAccess"}


def leaves() -> dict[str, Path]:
    """The concrete classes below the interfaces, and the package in which each is defined."""
    ours = classes()
    known = set(INTERFACES)
    while True:
        more = {name for name, (_, node) in ours.items() if known & set(map(last_name, node.bases))} - known
        if not more:
            break
        known |= more
    plans = {"ShadowPlan", "LinearPlan"}
    return {name: ours[name][0].parent for name in (known - INTERFACES) | plans if name in ours}


def test_nobody_asks_for_a_concrete_attack_defense_or_plan_outside_its_package() -> None:
    concrete, found = leaves(), []
    assert {"GradientMatching", "GradientPruning", "KernelRidge", "LinearPlan"} <= concrete.keys()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
                asked = {
                    last_name(part) for part in ast.walk(node.args[1]) if isinstance(part, ast.Name | ast.Attribute)
                }
                foreign = [name for name in asked & concrete.keys() if not path.is_relative_to(concrete[name])]
                found += [f"{path.relative_to(PACKAGE)}:{node.lineno} asks for {name}" for name in foreign]
    assert not found, "ask the interface instead: give it a method or a property"
