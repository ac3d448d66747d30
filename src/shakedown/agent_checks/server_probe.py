"""Ask an OpenAI-compatible server which models it serves: once before a run, once after faults."""

import time

import httpx

from shakedown.agent_checks.judge import ServerProbe


def with_version(base_url: str) -> str:
    """Add `/v1` to a URL that has no path; `http://host:8000/` becomes `http://host:8000/v1`."""
    url = base_url.rstrip("/")
    return f"{url}/v1" if url and url.count("/") == 2 else url


async def ask_server(base_url: str, api_key: str = "", *, seconds: float = 10.0) -> ServerProbe:
    """`GET {base_url}/models`; every fault of the server is in the returned view."""
    if not base_url:
        return ServerProbe()
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    begin = time.perf_counter()
    try:
        async with httpx.AsyncClient(timeout=seconds, trust_env=False) as client:
            answer = await client.get(f"{base_url}/models", headers=headers)
        body = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return ServerProbe(asked=True, error=f"{base_url}: {type(error).__name__} {error}".strip())
    except ValueError:
        body = {}
    rows = body.get("data") if isinstance(body, dict) else None
    names = [str(row["id"]) for row in rows or [] if isinstance(row, dict) and row.get("id")]
    return ServerProbe(True, True, names, time.perf_counter() - begin)
