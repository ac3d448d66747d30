"""A server of one answer a request for clients that are measured: in a process of its own."""

import asyncio
from collections.abc import Callable
from functools import partial

# The body of a request, and that of its answer, both JSON.
Answer = Callable[[bytes], bytes]
_HEAD = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"


def serve(port: int, answer: Answer, delay: float = 0.0) -> None:
    """Answer on 127.0.0.1 until the process is ended; `delay`: seconds before each answer.

    With so little code that the clients are what is measured.
    """
    asyncio.run(_serve(port, answer, delay))


async def _serve(port: int, answer: Answer, delay: float) -> None:
    connected = partial(_connected, answer, delay)
    server = await asyncio.start_server(connected, "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


async def _connected(
    answer: Answer, delay: float, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            content = answer(await reader.readexactly(_length(head)))
            await asyncio.sleep(delay)
            head = f"{_HEAD}content-length: {len(content)}\r\n\r\n".encode()
            writer.write(head + content)
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


def _length(head: bytes) -> int:
    lines = head.lower().split(b"\r\n")
    name = b"content-length:"
    return next((int(line.removeprefix(name)) for line in lines if line.startswith(name)), 0)
