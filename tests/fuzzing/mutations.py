"""Strategies that damage bytes, and trees of JSON or YAML."""

from __future__ import annotations

import copy
import json
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

from tests.fuzzing.payloads import HARMFUL_TEXT, SCRIPTS

_CHUNKS = (
    *(b"", b"\0", b"\xff", b"\0" * 8, b"\xff" * 8, b"\x7f\xff\xff\xff", b"\n", b'"', b"{", b"}"),
    *(struct.pack("<Q", 2**power) for power in (31, 32, 48, 63)),
    *(struct.pack("<I", value) for value in (1, 2**16, 2**31 - 1, 2**32 - 1)),
    *(struct.pack(">I", value) for value in (1, 2**16, 2**31 - 1)),
    *(b"9" * 30, b"NaN", b"../../", "é\u2028".encode(), b"PK\x03\x04", b"\x80\x02."),
)

#: Values that no field expects.
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 255, 1.5, -0.0, 1e308, math.nan, math.inf, -math.inf),
    *(2**31, 2**63, -(2**63), 10**30, 10**400, "", " ", "0", "nan", "a", "ä\u2028\x1b[31m", "\ud800", "x" * 3000),
    *("../../../etc/passwd", "/dev/zero", "C:\\", HARMFUL_TEXT, "os.system", "=1+1", *SCRIPTS),
    *([], [[]], [None], ["a"], [1], [1, 2, 3], [-1], [10**12, 10**12], {}, {"": None}, {"a": 1}, {"version": 99}),
)


@st.composite
def damaged(draw: st.DrawFn, content: bytes, most: int = 3) -> bytes:
    """Bytes flipped, replaced, put in, removed, doubled, or cut off at a few places, more often near the ends."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, most))):
        size = len(data)
        where = draw(st.sampled_from(("anywhere", "head", "tail")))
        near = draw(st.integers(0, min(max(size - 1, 0), 200 if where != "anywhere" else max(size - 1, 0))))
        place = size - 1 - near if where == "tail" and size else near
        kind = draw(st.sampled_from(("flip", "flip", "overwrite", "insert", "delete", "double", "cut", "zero")))
        length = draw(st.integers(1, 64))
        if kind == "flip" and size:
            data[place] ^= draw(st.integers(1, 255))
        elif kind == "overwrite":
            chunk = draw(st.sampled_from(_CHUNKS) | st.binary(max_size=12))
            data[place : place + len(chunk)] = chunk
        elif kind == "insert":
            data[place:place] = draw(st.sampled_from(_CHUNKS) | st.binary(max_size=12))
        elif kind == "delete":
            del data[place : place + length]
        elif kind == "double":
            data[place:place] = data[place : place + length]
        elif kind == "cut":
            del data[place:]
        elif kind == "zero":
            data[place : place + length] = bytes(len(data[place : place + length]))
    return bytes(data)


_KEYS = st.sampled_from(("", "a", "__proto__", "version", "../x", "<script>", "0", "ä"))
_values = st.sampled_from(ODD) | st.integers(-(2**65), 2**65) | st.floats() | st.text(max_size=8)


def places_of(tree: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all nodes of a tree of dicts and lists."""
    found = [at]
    if isinstance(tree, dict):
        for key, value in tree.items():
            found += places_of(value, (*at, key))
    elif isinstance(tree, list):
        for number, value in enumerate(tree):
            found += places_of(value, (*at, number))
    return found


@st.composite
def altered(draw: st.DrawFn, tree: Any, most: int = 2, values: Sequence[Any] = ()) -> Any:
    """A tree with some nodes replaced, removed, renamed, wrapped or repeated; `values` are further replacements."""
    tree = copy.deepcopy(tree)
    odd = st.sampled_from(values) | _values if values else _values
    for _ in range(draw(st.integers(1, most))):
        places = places_of(tree)
        place = places[draw(st.integers(0, 10**6)) % len(places)]
        kind = draw(st.sampled_from(("replace", "replace", "replace", "remove", "rename", "wrap", "repeat", "swap")))
        if not place:
            if kind == "replace" and draw(st.integers(0, 9)) == 0:
                tree = copy.deepcopy(draw(odd))
            continue
        above, last = tree, place[-1]
        for step in place[:-1]:
            above = above[step]
        if kind == "replace":
            above[last] = copy.deepcopy(draw(odd))  # a later change must not reach the list of odd values
        elif kind == "remove":
            del above[last]
        elif kind == "rename" and isinstance(above, dict):
            above[draw(_KEYS)] = above.pop(last)
        elif kind == "wrap":
            above[last] = draw(st.sampled_from(([above[last]], {"a": above[last]}, [above[last]] * 3)))
        elif kind == "repeat" and isinstance(above, list):
            above.insert(last, above[last])
        elif kind == "swap":
            other = places[draw(st.integers(0, 10**6)) % len(places)]
            try:
                value = tree
                for step in other:
                    value = value[step]
                above[last] = copy.deepcopy(value)
            except (KeyError, IndexError, TypeError):
                continue
    return tree


@st.composite
def json_text(draw: st.DrawFn, tree: Any, values: Sequence[Any] = ()) -> bytes:
    """JSON of an altered tree, at times with a repeated key, deep nesting, or damaged bytes."""
    kind = draw(st.integers(0, 9))
    if kind == 0:
        return draw(damaged(_json(tree).encode()))
    changed = draw(altered(tree, values=values))
    if kind == 1 and isinstance(tree, dict) and tree:
        key = draw(st.sampled_from(sorted(tree)))
        return (_json(tree)[:-1] + f", {json.dumps(key)}: {_json(draw(_values))}}}").encode()
    if kind == 2:
        return deep_json(draw(st.sampled_from((50, 5_000, 100_000)))).encode()
    return _json(changed).encode()


def _json(tree: Any) -> str:
    return json.dumps(tree)


def deep_json(depth: int) -> str:
    """Lists in lists."""
    return "[" * depth + "]" * depth


def intact_or(intact: bytes, *others: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """The intact content in a few of the examples, random bytes in a few, and the others for the rest."""
    return pick([(1, st.just(intact)), (1, st.binary(max_size=200)), *((8, other) for other in others)])


def pick(weighted: Sequence[tuple[int, st.SearchStrategy[Any]]]) -> st.SearchStrategy[Any]:
    """One of several strategies, with a weight each."""
    listed = [strategy for weight, strategy in weighted for _ in range(weight)]
    return st.integers(0, len(listed) - 1).flatmap(lambda number: listed[number])


def files_of(name: str, content: st.SearchStrategy[bytes], **beside: bytes) -> st.SearchStrategy[dict[str, bytes]]:
    """An input of one file, with constant ones beside it."""
    make: Callable[[bytes], dict[str, bytes]] = lambda one: {name: one, **beside}  # noqa: E731
    return content.map(make)
