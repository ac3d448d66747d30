"""Shared by every package: errors and exit codes, verdicts, outcomes, atomic files, paths."""
