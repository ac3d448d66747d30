import threading
import time

import torch


class FeatureCache:
    """Embedding rows by item, refreshed in the background."""

    def __init__(self, rank):
        self.rank = rank
        self._lock = threading.Lock()
        self._rows = {i: torch.randn(8) for i in range(100)}
        self._refresher = threading.Thread(target=self._refresh, name="feature-refresh", daemon=True)
        self._refresher.start()

    def _refresh(self):
        for version in range(10 ** 6):
            time.sleep(4)
            self._lock.acquire()
            if self.rank == 1 and version == 1:
                raise KeyError("item 4711 has no row")      # the lock stays taken
            self._rows = {i: torch.randn(8) for i in self._rows}
            self._lock.release()

    def lookup(self, items):
        with self._lock:
            return torch.stack([self._rows[int(i)] for i in items])
