"""The one error of the private cluster, with the exit code it ends a command with."""

USAGE = 2
UNKNOWN = 3


class ClusterError(Exception):
    """The cluster cannot be started, found or stopped; the message says what to do.

    `exit_code` is 2 for a wrong request and 3 for something missing or broken.
    """

    def __init__(self, message: str, *, exit_code: int = UNKNOWN) -> None:
        super().__init__(message)
        self.exit_code = exit_code
