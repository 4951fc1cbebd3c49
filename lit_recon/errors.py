"""The errors a user can meet: each message says what was expected, what came, where, and what to do."""

from __future__ import annotations

#: Largest number of characters of a message; the middle of a longer one, such as a long name in a file, is left out.
_LONGEST = 2000
#: Parts of the RuntimeErrors by which PyTorch reports a lack of memory, on CPUs and in CUDA's libraries.
_OF_MEMORY = ("out of memory", "can't allocate memory", "ALLOC_FAILED")


def lack_of_memory(error: Exception) -> str:
    """What an error says first, if it reports a lack of memory; empty for another error.

    >>> lack_of_memory(RuntimeError("CUDA out of memory. Tried to allocate 2 GiB."))
    'CUDA out of memory'
    """
    said = " ".join(str(error).split())
    if isinstance(error, MemoryError) or any(part in said for part in _OF_MEMORY):
        return said.partition(". ")[0] or type(error).__name__
    return ""


class LitReconError(Exception):
    """Root of all errors that the commands turn into one line and exit code 2.

    A message is one printable line, whatever names from a file are in it: line ends and control characters, which
    could write anything on a terminal, are shown as escapes.
    """

    def __init__(self, message: str = "") -> None:
        line = " ".join(message.split())
        if len(line) > _LONGEST:
            line = f"{line[: _LONGEST // 2]} ... {line[-_LONGEST // 2 :]}"
        super().__init__("".join(one if one.isprintable() else ascii(one)[1:-1] for one in line))


class ConfigError(LitReconError):
    """A setting is out of its range, or two settings contradict each other."""


class TimeLimitError(ConfigError):
    """A computation would take longer than its settings allow; with a larger limit it may succeed."""


class CorruptFileError(LitReconError):
    """A file exists but is truncated, malformed, or not what its name promises."""


class MissingDataError(LitReconError):
    """A file, folder or optional weight that the run needs is not there."""


class RunExistsError(LitReconError):
    """A run folder is already complete, or holds a run with other settings."""


class ShapeError(LitReconError):
    """A tensor or array has the wrong shape, dtype or value range."""


class ThreatModelError(LitReconError):
    """An attack needs knowledge that the observation does not grant."""


class UnsupportedModelError(LitReconError):
    """A model lacks the layer or the property that an operation needs."""


def check_kind(name: str, value: object, *kinds: type) -> None:
    """Refuse a value that is of none of these classes by a ConfigError that names it.

    >>> check_kind("labels", [0, 1], dict, str)
    Traceback (most recent call last):
    lit_recon.errors.ConfigError: labels must be dict or str; got a list
    """
    if not isinstance(value, kinds):
        got = f"a {type(value).__name__}"
        if isinstance(value, type):
            got = f"the class {value.__name__}: give an instance"
        raise ConfigError(f"{name} must be {' or '.join(kind.__name__ for kind in kinds)}; got {got}")
