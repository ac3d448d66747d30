"""A stand-in engine on a free local port, for as long as a test needs it."""

import contextlib
import threading
from collections.abc import Iterator

from tests.faults.fake_engine import Engine


@contextlib.contextmanager
def running(mode: str = "good") -> Iterator[Engine]:
    """Speaks SGLang's protocol and always answers alike; modes: see `fake_engine`."""
    engine = Engine("127.0.0.1", 0, mode)
    thread = threading.Thread(target=engine.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield engine
    finally:
        engine.shutdown()
        engine.server_close()
        thread.join()
