"""Small programs that stand in for shards and router, so that the launcher is tested for what goes wrong."""

import sys
from pathlib import Path

from tgi_server.launcher.processes.child import Command

SHARD = """
import os, signal, socket, sys, time
path, seconds, marker = sys.argv[1], float(sys.argv[2]), sys.argv[3]
time.sleep(seconds)
def stop(*_):
    os.unlink(path)
    open(marker, "a").write(os.path.basename(path) + " stopped\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
listener = socket.socket(socket.AF_UNIX)
listener.bind(path)
listener.listen()
while True:
    listener.accept()
"""

ROUTER = """
import http.server, os, signal, socket, sys, time
port, drain, marker = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_): pass
def stop(*_):
    time.sleep(drain)
    open(marker, "a").write("router stopped\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
server = http.server.HTTPServer(("127.0.0.1", port), Handler)
ready = socket.socket(socket.AF_UNIX)
ready.bind(os.path.join(os.path.dirname(marker), "shard-0-router"))
ready.listen()
server.serve_forever()
"""


def program(name: str, source: str, *arguments: object) -> Command:
    return Command(name, [sys.executable, "-c", source, *map(str, arguments)])


def shard(rank: int, path: Path, marker: Path, seconds: float = 0) -> Command:
    """Listens after `seconds`; says in the file `marker` that it was stopped."""
    return program(f"shard-{rank}", SHARD, path, seconds, marker)


def router(port: int, marker: Path, drain: float = 0) -> Command:
    """Takes `drain` seconds to stop. The sockets are in the folder of `marker`."""
    return program("router", ROUTER, port, drain, marker)
