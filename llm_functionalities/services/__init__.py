"""The gRPC services, with the admission, context and errors that all calls have in common."""
