"""Programs that answer as Slurm's do."""

import stat
from pathlib import Path


def program(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def answers(folder: Path, name: str, text: str) -> None:
    (folder / f"{name}.txt").write_text(text)
    program(folder, name, f'echo "$@" > {folder}/{name}.asked; cat {folder}/{name}.txt')
