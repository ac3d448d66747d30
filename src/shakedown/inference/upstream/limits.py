"""Seconds that hold for every client of an inference server, the agents' own one too."""

# Below the server's own limit: uvicorn, and so vLLM and SGLang, closes an idle connection after
# 5 s, and a request that is sent just then is lost.
IDLE_SECONDS = 3.0
# Thousands of requests at once wait in the server's accept queue: with a client's usual 5 s, and
# 1000 connections, 999 of 2048 timed out; with these all were answered.
CONNECT_SECONDS = 60.0
