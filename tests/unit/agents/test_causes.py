"""Classification of failures from exceptions alone, for clients that are not installed too."""

import pytest

from shakedown.agents.causes import CAUSES, classify, status_code
from shakedown.agents.contract import AgentExitError, BadReturnError


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    """The error as it looks after it was raised from `cause`."""
    try:
        raise error from cause
    except BaseException as caught:  # noqa: BLE001 - handed back to the caller
        return caught


def foreign(name: str, **attributes: object) -> BaseException:
    """An exception of a library's class, known by its name only."""
    return type(name, (Exception,), dict(attributes))("said by the library")  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("outer", "inner", "cause"),
    [
        ("APITimeoutError", "ConnectTimeout", "connect_timeout"),
        ("APITimeoutError", "PoolTimeout", "pool_timeout"),
        ("APITimeoutError", "ReadTimeout", "read_timeout"),
        ("APITimeoutError", "", "read_timeout"),
        ("APIConnectionError", "ConnectError", "connection"),
        ("APIConnectionError", "RemoteProtocolError", "connection"),
        ("APIConnectionError", "", "connection"),
        ("ClientConnectionError", "", "connection"),
        ("AnythingElse", "", "exception"),
    ],
)
def test_the_innermost_transport_error_names_the_cause(outer: str, inner: str, cause: str) -> None:
    error = raised(foreign(outer), foreign(inner) if inner else None)
    assert classify(error)[0] == cause


def test_python_s_own_connection_errors_count() -> None:
    assert classify(raised(ConnectionRefusedError(111, "refused")))[0] == "connection"


def test_a_bug_while_a_connection_error_was_handled_is_the_agent_s_own() -> None:
    error = KeyError("typo in the handler")
    error.__context__ = ConnectionResetError("reset")  # what Python sets in an `except` block
    assert classify(raised(error))[0] == "exception"


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (BadReturnError("no"), "bad_return"),
        (AgentExitError("bye"), "exit"),
        (foreign("APIStatusError", status_code=503), "api_status"),
        (foreign("APIStatusError", status_code=True), "exception"),
        (foreign("APIStatusError", status_code="500"), "exception"),
    ],
)
def test_other_causes(error: BaseException, cause: str) -> None:
    assert classify(raised(error))[0] == cause
    assert cause in CAUSES


def test_a_status_is_found_on_the_response_of_the_error() -> None:
    response = type("Response", (), {"status_code": 429})()
    assert status_code(foreign("HTTPStatusError", response=response)) == 429


def test_a_chain_that_is_a_circle_ends() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert classify(first)[0] == "exception"


def test_hostile_messages_are_one_bounded_line() -> None:
    detail = classify(raised(ValueError("x\n" * 100_000)))[1]
    assert "\n" not in detail
    assert len(detail) < 1000
