"""The gRPC service around one engine, and its command line."""
