"""Finished runs to make pages of, as in the tests of reporting."""

from __future__ import annotations

from tests.reporting.conftest import make_run as make_run
