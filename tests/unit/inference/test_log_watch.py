"""A log that is read as it grows."""

from pathlib import Path

from shakedown.inference.log_watch import LogWatch

LINE = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"


def test_line_that_is_written_in_two_parts_is_seen_once(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    watch = LogWatch(log)
    assert not watch.look()

    log.write_text("INFO\n" + LINE[:10])
    assert not watch.look()
    log.write_text("INFO\n" + LINE)

    assert watch.look()
    assert "GPU's memory" in watch.trouble
    assert not watch.look()


def test_cause_that_scrolled_by_is_told_at_death(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(LINE + "INFO: fine\n" * 300_000)

    cause = LogWatch(log).cause(1)

    assert cause is not None
    assert "GPU's memory" in cause.text


def test_end_of_the_log_wins_over_what_was_named_before(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(
        LINE + "INFO: fine\n" * 300_000 + "OSError: [Errno 28] No space left on device\n"
    )

    cause = LogWatch(log).cause(1)

    assert cause is not None
    assert "disk is full" in cause.text


def test_missing_log_leaves_the_exit_code(tmp_path: Path) -> None:
    watch = LogWatch(tmp_path / "none")

    cause = watch.cause(-9)

    assert cause is not None
    assert "killed from outside" in cause.text
    assert watch.cause(1) is None
