"""The errors a user can meet: each message says what was expected, what came, where, and what to do."""

from __future__ import annotations


class LitReconError(Exception):
    """Root of all errors that the commands turn into one line and exit code 2."""


class ConfigError(LitReconError):
    """A setting is out of its range, or two settings contradict each other."""


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
