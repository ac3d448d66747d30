"""The socket that the recording proxy listens on."""

import socket
import time
from typing import Any

from shakedown.agents.wire import out_of_descriptors

_AGAIN_SECONDS = 0.5  # less than asyncio waits before it tries again


class ListeningSocket(socket.socket):
    """Bound to a free port; notes when there was no descriptor left for a connection.

    asyncio leaves such a connection in the queue, where its client waits, says so and tries again a
    second later.

    Args:
        host: its own address.

    `full_at`: Unix time of the last such connection; 0: there was none.
    """

    def __init__(self, host: str) -> None:
        super().__init__(socket.AF_INET, socket.SOCK_STREAM)
        self.full_at = 0.0
        self.bind((host, 0))

    def accept(self) -> tuple[socket.socket, Any]:
        """As of any socket."""
        try:
            return super().accept()
        except OSError as error:
            if not out_of_descriptors(error):
                raise
            before, self.full_at = self.full_at, time.time()
            if self.full_at - before < _AGAIN_SECONDS:
                # asyncio does not stop at the first one, and would say it thousands of times.
                raise BlockingIOError from error
            raise
