"""Strategies of zip archives: what `.npz`, `.pt` and `.pt2` files are made of."""

from __future__ import annotations

import io
import struct
import warnings
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.fuzzing.mutations import damaged

Entries = list[tuple[str, bytes]]
#: Names that an entry should not have.
_NAMES = ("../../out", "/etc/out", "", "a/../b", "train_images", "ä\u2028", "<script>", "a" * 300, "__pycache__/x")


def zipped(entries: Entries, method: int = zipfile.ZIP_STORED) -> bytes:
    """An archive, with repeated names where there are some."""
    buffer = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(buffer, "w", method) as archive:
        warnings.simplefilter("ignore")  # about repeated names
        for name, content in entries:
            info = zipfile.ZipInfo(name)
            info.compress_type = method
            with archive.open(info, "w") as file:
                file.write(content)
        archive._didModify = True  # an archive without entries is written, too
    return buffer.getvalue()


def entries_of(content: bytes) -> Entries:
    """Names and contents of an archive."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return [(name, archive.read(name)) for name in archive.namelist()]


#: Offsets in a central directory entry: flags, method, checksum, sizes, offset of the local header.
_FIELDS = {8: "<H", 10: "<H", 16: "<I", 20: "<I", 24: "<I", 42: "<I"}


@st.composite
def rezipped(draw: st.DrawFn, entries: Entries, change: Callable[[str, bytes], st.SearchStrategy[bytes]]) -> bytes:
    """An archive with one or two changes of entries; `change` makes contents from name and content."""
    intact, entries = dict(entries), list(entries)
    for _ in range(draw(st.integers(1, 2))):
        if not entries:
            break
        number = draw(st.integers(0, 10**4)) % len(entries)
        name, content = entries[number]
        content = intact.get(name, content)
        kind = draw(st.sampled_from(("content", "content", "content", "content", "rename", "drop", "repeat", "add")))
        if kind == "content":
            entries[number] = name, draw(change(name, content))
        elif kind == "rename":
            other = entries[draw(st.integers(0, 10**4)) % len(entries)][0]
            entries[number] = draw(st.sampled_from((*_NAMES, other, name.upper()))), content
        elif kind == "drop":
            del entries[number]
        elif kind == "repeat":
            entries.append((name, draw(st.just(content) | change(name, content))))
        elif kind == "add":
            entries.append((draw(st.sampled_from(_NAMES)), content))
    return zipped(entries, draw(st.sampled_from((zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))))


@st.composite
def misfiled(draw: st.DrawFn, content: bytes) -> bytes:
    """An archive with a wrong field in its central directory: encrypted, another method, sizes that are not so."""
    data = bytearray(content)
    starts = [place for place in range(len(data) - 46) if data[place : place + 4] == b"PK\x01\x02"]
    start = starts[draw(st.integers(0, 10**4)) % len(starts)]
    field = draw(st.sampled_from(sorted(_FIELDS)))
    value = draw(st.sampled_from((0, 1, 8, 9, 12, 14, 93, 99, 2**15, 2**16 - 1, 2**31, 2**32 - 1)))
    form = _FIELDS[field]
    data[start + field : start + field + struct.calcsize(form)] = struct.pack(
        form, value % 256 ** struct.calcsize(form)
    )
    return bytes(data)


def npy(array: np.ndarray[Any, Any]) -> bytes:
    """An array as a file of NumPy."""
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def npy_with(header: Mapping[str, Any] | str, body: bytes, version: tuple[int, int] = (1, 0)) -> bytes:
    """A file of NumPy with any header."""
    text = (header if isinstance(header, str) else repr(dict(header))).encode("latin1", "replace") + b"\n"
    form = "<H" if version == (1, 0) else "<I"
    length = min(len(text), 2 ** (8 * struct.calcsize(form)) - 1)
    return b"\x93NUMPY" + bytes(version) + struct.pack(form, length) + text


_SHAPES = (
    *((), (0,), (1,), (20,), (-1, 8, 8), (20, 8), (20, 8, 8), (20, 8, 8, 1), (20, 8, 8, 3), (20, 1, 8, 8), (10, 8, 8)),
    *(
        (10**6, 10**3, 10**3),
        (2**63, 1, 1),
        (10**30,),
        (0, 10**18),
        (2**40, 2**40),
        "20",
        (20, 8.0),
        (None,),
        [20, 8, 8],
    ),
)
_DTYPES = (
    "|u1",
    "|i1",
    "<u2",
    ">i4",
    "<i8",
    "<f4",
    "<f8",
    "|b1",
    "|O",
    "|V8",
    "<U4",
    "|S3",
    "<M8[s]",
    "<m8[D]",
    "<c16",
)
_DTYPES_ODD = (
    "",
    "u1",
    "object",
    "<U999999999",
    "|V2147483647",
    [("a", "<i8")],
    [("a", "|O")],
    None,
    5,
    "<i3",
    ("u1", (4,)),
)


@st.composite
def changed_npy(draw: st.DrawFn, content: bytes) -> bytes:
    """An array file with another header, the wrong amount of content, or damaged bytes."""
    array = np.load(io.BytesIO(content))
    header: dict[str, Any] = {"descr": array.dtype.str, "fortran_order": False, "shape": array.shape}
    body = array.tobytes()
    kind = draw(st.sampled_from(("header", "header", "damage", "other", "text", "values")))
    if kind == "header":
        for field in draw(
            st.lists(st.sampled_from(("descr", "fortran_order", "shape", "extra")), min_size=1, max_size=2)
        ):
            odd = {
                "shape": _SHAPES,
                "descr": (*_DTYPES, *_DTYPES_ODD),
                "fortran_order": (True, None, "x"),
                "extra": (1,),
            }
            header[field] = draw(st.sampled_from(odd[field]))
        if draw(st.integers(0, 9)) == 0:
            header.pop(draw(st.sampled_from(sorted(header))))
        return npy_with(header, body, draw(st.sampled_from(((1, 0), (1, 0), (2, 0), (3, 0))))) + body
    if kind == "damage":
        return draw(damaged(content))
    if kind == "text":
        text = draw(
            st.sampled_from(("{", "{'descr': '|u1'", "(" * 3000, "[" * 90 + "]" * 90, "__import__('os')", "'\\", ""))
        )
        return npy_with(text, body) + body
    if kind == "values":
        values = array.copy()
        if values.size:
            flat = values.reshape(-1)
            flat[draw(st.integers(0, 10**4)) % values.size] = draw(st.sampled_from((0, 1, 2, 3, 100)))
        return npy(values)
    dtype = draw(
        st.sampled_from(("uint8", "int8", "int64", "uint64", "float32", "float64", "bool", "m8[D]", "U5", "S4"))
    )
    shape = draw(
        st.sampled_from(((), (0,), (1,), (20,), (10,), (20, 8, 8), (20, 8, 8, 3), (0, 8, 8), (20, 0, 8), (2,)))
    )
    return npy(np.full(shape, draw(st.sampled_from((0, 1, 2, 100))), dtype))
