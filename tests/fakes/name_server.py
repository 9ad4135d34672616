"""A stand-in for a name server: UDP and TCP on loopback, with answers by name."""

import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress

import dns.flags
import dns.message
import dns.rcode
import dns.rrset

Records = dict[str, list[tuple[str, str]]]


class NameServer:
    """Answers for the names in `records`: absolute name -> [(type, value)]; the others do not exist.

    `mode`: "answer", "silent" (never answers), "servfail", "garbage", "truncate" (only TCP answers whole), or
    "bare_alias" (an alias comes without what it stands for).
    """

    def __init__(self, records: Records | None = None, port: int = 0) -> None:
        self.records: Records = records or {}
        self.mode = "answer"
        self.asked: list[str] = []
        self._udp, self._tcp = _both(port)
        self.port: int = self._udp.getsockname()[1]

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    def __enter__(self) -> "NameServer":
        for serve in (self._serve_udp, self._serve_tcp):
            threading.Thread(target=serve, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        # A shutdown wakes the thread that waits on a socket; closing alone does not.
        for listener in (self._udp, self._tcp):
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()

    def _serve_udp(self) -> None:
        self._until_closed(self._answer_datagram)

    def _answer_datagram(self) -> None:
        wire, sender = self._udp.recvfrom(4096)
        if not wire:
            raise OSError("closed")
        if (answer := self._answer(wire, tcp=False)) is not None:
            self._udp.sendto(answer, sender)

    def _serve_tcp(self) -> None:
        self._until_closed(self._answer_connection)

    def _answer_connection(self) -> None:
        connection, _ = self._tcp.accept()
        with connection:
            (length,) = struct.unpack("!H", connection.recv(2))
            if (answer := self._answer(connection.recv(length), tcp=True)) is not None:
                connection.sendall(struct.pack("!H", len(answer)) + answer)

    def _until_closed(self, once: Callable[[], None]) -> None:
        while True:
            try:
                once()
            except OSError:
                return

    def _answer(self, wire: bytes, tcp: bool) -> bytes | None:
        query = dns.message.from_wire(wire)
        question = query.question[0]
        name, kind = str(question.name).lower(), dns.rdatatype.to_text(question.rdtype)
        self.asked.append(f"{name} {kind}")
        if self.mode == "silent":
            return None
        if self.mode == "garbage":
            return b"\x00" * 12
        response = dns.message.make_response(query)
        response.flags |= dns.flags.RA
        if self.mode == "servfail":
            response.set_rcode(dns.rcode.SERVFAIL)
        elif self.mode == "truncate" and not tcp:
            response.flags |= dns.flags.TC
        else:
            self._fill(response, name, kind)
        return response.to_wire()

    def _fill(self, response: dns.message.Message, name: str, kind: str) -> None:
        if name not in self.records:
            response.set_rcode(dns.rcode.NXDOMAIN)
            return
        for found, value in self.records[name]:
            if found in (kind, "CNAME"):
                response.answer.append(dns.rrset.from_text(name, 60, "IN", found, value))
            if found == "CNAME" and self.mode != "bare_alias" and value != name:
                self._fill(response, value, kind)


def _both(port: int) -> tuple[socket.socket, socket.socket]:
    """A UDP and a TCP socket at the same port, which is any that is free for both when `port` is 0."""
    while True:
        udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        udp.bind(("127.0.0.1", port))
        try:
            return udp, socket.create_server(udp.getsockname())
        except OSError:
            udp.close()
            if port:
                raise
