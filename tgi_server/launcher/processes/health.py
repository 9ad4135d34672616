"""Asks the router whether it serves. So little HTTP that it needs no client library."""

import asyncio

ANSWER_SECONDS = 5.0


async def is_healthy(host: str, port: int) -> bool:
    """Whether `GET /health` is answered with 200."""
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(f"GET /health HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
                return (await reader.readline()).split()[1:2] == [b"200"]
            finally:
                writer.close()
    except OSError:
        return False
