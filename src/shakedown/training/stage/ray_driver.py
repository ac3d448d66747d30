"""Waits until a Ray cluster has all its nodes, then becomes the driver's command.

Run as a file by the trainer's own Python, which has ray and need not have this package:
`PYTHON ray_driver.py NODES SECONDS -- COMMAND...`, with the cluster's address in RAY_ADDRESS.
"""

import os
import sys
import time

_FIRST_WITH_TOKENS = (2, 52)


def say_if_open(version: str) -> None:
    """Warn of a Ray without tokens, which lets in everybody who reaches it."""
    if tuple(map(int, version.split(".")[:2])) < _FIRST_WITH_TOKENS:
        print(
            f"ray: WARNING {version} asks for no token: every user of this machine can run "
            "programs as you while it runs; expected ray 2.52 or later",
            flush=True,
        )


def wait_for_nodes(wanted: int, seconds: float) -> None:
    """Return once as many nodes live; tell each change.

    Raises:
        SystemExit: not within `seconds`.
    """
    import ray

    say_if_open(ray.__version__)
    deadline, seen = time.monotonic() + seconds, -1
    while True:
        try:
            if not ray.is_initialized():
                ray.init(log_to_driver=False, logging_level="ERROR")
            living = sorted(n["NodeManagerHostname"] for n in ray.nodes() if n["Alive"])
        except (ConnectionError, RuntimeError, TimeoutError) as error:
            living, why = [], f": {error}".splitlines()[0][:200]
        else:
            why = f": {', '.join(living)}"
        if len(living) != seen:
            seen = len(living)
            print(f"ray: {seen} of {wanted} node(s) have joined{why}", flush=True)
        if seen >= wanted:
            ray.shutdown()
            return
        if time.monotonic() > deadline:
            sys.exit(f"ray: only {seen} of {wanted} node(s) joined within {seconds:.0f} s{why}")
        time.sleep(1.0)


def main() -> None:
    """Wait, then run the command in this process's place."""
    nodes, seconds, _, *command = sys.argv[1:]
    wait_for_nodes(int(nodes), float(seconds))
    os.execvp(command[0], command)  # noqa: S606


if __name__ == "__main__":
    main()
