"""A worker process's side of the talk with its pool: one JSON object a line.

Imports nothing heavy: workers of rewards start in 50 ms.
"""

import json
import os
import signal
import threading
from typing import Any

# Sent to a whole stage: its trainer still finishes the step in work, with its rewards. Workers end
# with their parent.
_NOT_FOR_US = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


class WorkerStreams:
    """Takes the standard streams: what the user's code prints goes to standard error.

    `requests`: the descriptor to read requests from.
    """

    def __init__(self) -> None:
        for number in _NOT_FOR_US:
            signal.signal(number, lambda *_: None)  # not SIG_IGN: that would pass to children
        self.requests, self._turn = os.dup(0), threading.Lock()
        self._replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
        # User code that prints or reads must not spoil the talk.
        os.dup2(2, 1)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)

    def read_setup(self) -> Any:
        """The first line; None when the parent is gone."""
        line = bytearray()
        # Byte by byte: what follows belongs to the one who reads `requests` afterwards.
        while not line.endswith(b"\n"):
            byte = os.read(self.requests, 1)
            if not byte:
                return None
            line += byte
        return json.loads(line)

    def say(self, **reply: Any) -> None:
        """Write one line; threads may do so at once."""
        line = json.dumps(reply) + "\n"
        try:
            with self._turn:
                self._replies.write(line)
                self._replies.flush()
        except BrokenPipeError:
            os._exit(0)  # nobody is left to hear
