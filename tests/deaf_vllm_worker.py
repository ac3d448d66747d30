"""A worker extension for a real vLLM whose second replica does not take the weights it is told to.

What it does instead is said by a file beside the weights: with `deaf` it loads nothing and says
that it has, with `stuck` it does not answer for a while.
"""

import time
from pathlib import Path
from typing import Any

from shakedown.inference.vllm_worker import WorkerExtension

STUCK_SECONDS = 60.0


class Deaf(WorkerExtension):
    """`--worker-extension-cls tests.deaf_vllm_worker.Deaf`."""

    vllm_config: Any

    def load_policy(self, weights_path: str) -> dict[str, Any]:
        """As vLLM's worker would be told."""
        if self.vllm_config.parallel_config.data_parallel_index == 1:
            if Path(weights_path, "deaf").exists():
                return {"repacked": 0}
            if Path(weights_path, "stuck").exists():
                time.sleep(STUCK_SECONDS)
        return super().load_policy(weights_path)
