"""One attempt of a training stage: its processes, their supervision and its outcome."""
