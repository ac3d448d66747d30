"""How an inference server is called: connections, retries, neutral sampling, what it serves.

Here is what holds for every client of a server, the agents' own one too.
"""

from collections.abc import Mapping
from types import MappingProxyType

# Seconds. Below the server's own limit: uvicorn, and so vLLM and SGLang, closes an idle connection
# after 5 s, and a request that is sent just then is lost.
IDLE_SECONDS = 3.0
# Thousands of requests at once wait in the server's accept queue: with a client's usual 5 s, and
# 1000 connections, 999 of 2048 timed out; with these all were answered.
CONNECT_SECONDS = 60.0
# Sampling that narrows nothing, said in every request: a server fills what is left out from the
# checkpoint's generation_config.json, and tokens are drawn from another distribution than the
# trained one.
NEUTRAL: Mapping[str, float] = MappingProxyType(
    {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
)
