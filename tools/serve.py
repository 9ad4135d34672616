"""`make serve`: both services in the foreground, until Ctrl-C or SIGTERM.

The model is the bundled one unless MODEL_ID names another; launcher flags may follow: `python -m tools.serve --dtype
float32`.
"""

import sys

from tools.services import first_to_end, interrupt_on_signals, llm_functionalities, text_generation_server

HTTP_PORT = 8080
GRPC_PORT = 8000


def main() -> int:
    """Returns 0 when asked to stop, 1 when a service ended by itself."""
    interrupt_on_signals()
    print(f"starting: HTTP on port {HTTP_PORT}, gRPC on port {GRPC_PORT}; Ctrl-C stops both", flush=True)
    services = []
    try:
        services.append(text_generation_server(HTTP_PORT, *sys.argv[1:]))
        services.append(llm_functionalities(GRPC_PORT, f"http://127.0.0.1:{HTTP_PORT}"))
        ended = first_to_end(services)
        print(f"{ended.name} has ended with exit code {ended.exit_code()}; stopping", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopping", flush=True)
        return 0
    finally:
        for service in reversed(services):
            service.stop()


if __name__ == "__main__":
    sys.exit(main())
