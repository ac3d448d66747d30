"""Readers of evidence files: one file a format, chosen by what a file contains."""

from shakedown.diagnosis.read.registry import Evidence, Skipped, read_paths

__all__ = ["Evidence", "Skipped", "read_paths"]
