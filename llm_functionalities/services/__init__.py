"""The gRPC services, and what happens around each of their calls."""
