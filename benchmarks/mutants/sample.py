"""A random sample of small faults in the package, written by Cosmic Ray."""

from __future__ import annotations

import ast
import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Packages and modules of `lit_recon` by the name that the record gives them.
ROOMS = {
    "attacks": ("attacks",),
    "bounds": ("bounds",),
    "defenses": ("defenses",),
    "metrics": ("metrics",),
    "observation": ("clients", "records.py"),
    "privacy": ("privacy",),
}
#: Each room has at least this many mutants of a sample; the rest goes by lines of code.
LEAST = 15
#: Replacements of an operator by one of its own group: the others end in a TypeError at once and tell nothing.
GROUPS = (
    {"Add", "Sub", "Mul", "Div", "FloorDiv", "Mod", "Pow"},
    {"LShift", "RShift", "BitAnd", "BitOr", "BitXor"},
    {"Lt", "LtE", "Gt", "GtE", "Eq", "NotEq"},
    {"Is", "IsNot"},
    {"In", "NotIn"},
    {"UAdd", "USub"},
    {"Delete", "USub"},
    {"Delete", "Invert"},
    {"Delete", "Not"},
)

_PUNCTUATION = frozenset("()[]{},.:=")

Position = tuple[int, int]


@dataclass(frozen=True)
class Mutant:
    """One change of one place; `key` stays the same while other lines of the module change."""

    room: str
    file: str
    line: int
    operator: str
    occurrence: int
    key: str


def rank(seed: int, key: str) -> str:
    """A random order that does not depend on what else is ordered."""
    return hashlib.sha256(f"{seed}|{key}".encode()).hexdigest()


def spared(source: str) -> list[tuple[Position, Position]]:
    """Ranges of lines and columns that are not mutated: they do not act, or only word a message.

    Type annotations and aliases, decorators, `if TYPE_CHECKING`, `raise` with its message, `assert`, f-strings,
    warnings, and `strict=` of `zip`.
    """
    lines = source.splitlines()

    def position(line: int, byte: int) -> Position:
        return line, len(lines[line - 1].encode()[:byte].decode())

    def nodes() -> Iterator[ast.expr | ast.stmt | ast.keyword]:
        tree = ast.parse(source)
        yield from (node for node in tree.body if isinstance(node, ast.Assign) and _is_alias(node.value))
        for node in ast.walk(tree):
            match node:
                case ast.arg(annotation=ast.expr() as annotation) | ast.AnnAssign(annotation=annotation):
                    yield annotation
                case ast.FunctionDef(returns=returns, decorator_list=decorators):
                    yield from decorators
                    if returns is not None:
                        yield returns
                case ast.ClassDef(decorator_list=decorators):
                    yield from decorators
                case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                    yield node
                case ast.Raise() | ast.Assert() | ast.JoinedStr() | ast.keyword(arg="strict"):
                    yield node
                case ast.Call(func=ast.Attribute(attr="warn") | ast.Name(id="warn")):
                    yield node

    return [
        (position(node.lineno, node.col_offset), position(node.end_lineno or 0, node.end_col_offset or 0))
        for node in nodes()
    ]


def _is_alias(value: ast.expr) -> bool:
    """Whether an expression is a union or a subscripted type."""
    return isinstance(value, ast.Subscript) or (isinstance(value, ast.BinOp) and isinstance(value.op, ast.BitOr))


def _is_used(operator: str) -> bool:
    """Whether an operator of Cosmic Ray makes mutants that are not refused at once."""
    kind, *change = operator.partition("/")[2].split("_")
    if kind.startswith("Replace") and len(change) == 2:
        return any(set(change) <= group for group in GROUPS)
    return kind not in {"RemoveDecorator", "VariableInserter", "VariableReplacer"}


def mutants(room: str, file: str) -> Iterator[list[Mutant]]:
    """The places of a module that can be mutated, each with its mutants."""
    from cosmic_ray import plugins
    from cosmic_ray.ast import ast_nodes, get_ast

    source = (ROOT / file).read_text(encoding="utf-8")
    lines, ranges = source.splitlines(), spared(source)
    nodes = [node for node in ast_nodes(get_ast(source)) if getattr(node, "value", "") not in _PUNCTUATION]
    places: dict[tuple[Position, Position], list[tuple[str, int]]] = defaultdict(list)
    for name in filter(_is_used, plugins.operator_names()):
        kind = plugins.get_operator(name)
        for occurrence, (start, end) in enumerate(at for node in nodes for at in kind().mutation_positions(node)):
            large = name.endswith("NumberReplacer") and abs(complex(lines[start[0] - 1][start[1] : end[1]])) >= 10
            if not large and not any(first <= start and end <= last for first, last in ranges):
                places[start, end].append((name, occurrence))
    seen: Counter[str] = Counter()
    for (start, end), changes in sorted(places.items()):
        place = f"{file}|{lines[start[0] - 1].strip()}|{lines[start[0] - 1][start[1] : end[1]]}"
        seen[place] += 1
        yield [
            Mutant(room, file, start[0], name, occurrence, f"{place}|{seen[place]}|{name}|{again}")
            for again, (name, occurrence) in enumerate(changes)
        ]


def code_lines(source: str) -> int:
    """Lines on which a statement or an expression other than a docstring begins."""
    tree = ast.parse(source)
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return len({node.lineno for node in ast.walk(tree) if isinstance(node, ast.expr) and id(node) not in texts})


def shares(lines: Mapping[str, int], size: int) -> dict[str, int]:
    """Mutants of each room: `LEAST`, and of the rest in proportion to the lines of code."""
    rest, total = size - LEAST * len(lines), sum(lines.values())
    exact = {room: rest * count / total for room, count in lines.items()}
    given = {room: int(share) for room, share in exact.items()}
    for room in sorted(exact, key=lambda room: given[room] - exact[room])[: rest - sum(given.values())]:
        given[room] += 1
    return {room: LEAST + share for room, share in given.items()}


def draw(size: int, seed: int) -> list[Mutant]:
    """A sample: places of each room without replacement, one mutant of each, in random order over all rooms."""
    files = {
        room: [
            str(path.relative_to(ROOT)) for name in names for path in sorted(python_files(ROOT / "lit_recon" / name))
        ]
        for room, names in ROOMS.items()
    }
    lines = {room: sum(code_lines((ROOT / file).read_text("utf-8")) for file in names) for room, names in files.items()}
    sample = []
    for room, count in shares(lines, size).items():
        places = [place for file in files[room] for place in mutants(room, file)]
        places.sort(key=lambda place: rank(seed, place[0].key.rsplit("|", 2)[0]))
        chosen = (min(place, key=lambda mutant: rank(seed, mutant.key)) for place in places)
        sample += list(islice(filter(_acts, chosen), count))
    return sorted(sample, key=lambda mutant: rank(seed, mutant.key))


def _acts(mutant: Mutant) -> bool:
    """Whether the mutant is Python: the `*` and `/` of signatures and calls are mutated like operators."""
    try:
        ast.parse(mutated(mutant))
    except SyntaxError:
        return False
    return True


def python_files(path: Path) -> Iterable[Path]:
    """The modules in a folder, or the one module itself."""
    return path.rglob("*.py") if path.is_dir() else [path]


def mutated(mutant: Mutant) -> str:
    """The module's source with the mutant in it."""
    from cosmic_ray import plugins
    from cosmic_ray.mutating import mutate_code

    source = (ROOT / mutant.file).read_text(encoding="utf-8")
    code = mutate_code(source, plugins.get_operator(mutant.operator)(), mutant.occurrence)
    assert code is not None
    return code
