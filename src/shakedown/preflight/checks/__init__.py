"""The checks that every node runs: one row here, one small function that returns facts.

A check measures and never judges; preflight/rules.py judges. It raises when it cannot measure.
"""

from collections.abc import Callable

from shakedown.preflight.checks.environment import environment
from shakedown.preflight.checks.gpus import gpus
from shakedown.preflight.checks.host import clock, host, limits, memory, shm
from shakedown.preflight.checks.network import names, ports
from shakedown.preflight.checks.storage import files, paths, visibility
from shakedown.preflight.model import Facts, ProbeRequest

# name -> function of (request, this node's name)
CHECKS: dict[str, Callable[[ProbeRequest, str], Facts]] = {
    "clock": clock,
    "host": host,
    "memory": memory,
    "shm": shm,
    "limits": limits,
    "environment": environment,
    "files": files,
    "visibility": visibility,
    "names": names,
    "ports": ports,
    "gpus": gpus,
    "paths": paths,
}
