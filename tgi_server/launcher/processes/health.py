"""Asks the router whether it serves. So little HTTP that it needs no client library."""

import asyncio

ANSWER_SECONDS = 5.0


async def is_healthy(host: str, port: int) -> bool:
    """Whether `GET /health` is answered with 200."""
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                head = f"GET /health HTTP/1.1\r\nHost: {authority(host, port)}\r\nConnection: close\r\n\r\n"
                writer.write(head.encode())
                return (await reader.readline()).split()[1:2] == [b"200"]
            finally:
                writer.close()
    except OSError:
        return False


def authority(host: str, port: int) -> str:
    """Host and port as URLs have them (RFC 3986)."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
