"""The parser as the tests reach it."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def testing() -> ModuleType:
    """The native testing module; `make test` always builds it."""
    return importlib.import_module("reflex_worker._testing")


@pytest.fixture
def refused(testing):
    """refused(run, kind, *words): run() raises the typed error and its message holds the words."""

    def check(run, kind: str, *words: str) -> str:
        with pytest.raises(testing.Error) as e:
            run()
        assert e.value.kind == kind
        message = str(e.value)
        for word in words:
            assert word in message
        return message

    return check
