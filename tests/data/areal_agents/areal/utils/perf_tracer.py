"""Stands in for AReaL's own `areal.utils.perf_tracer`: traces nothing."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any


def session_context(*_names: str) -> Callable[[Any], Any]:
    return lambda function: function


trace_session = session_context


@asynccontextmanager
async def atrace_session_phase(_name: str) -> AsyncIterator[None]:
    yield
