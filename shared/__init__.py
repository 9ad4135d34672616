"""What both services use: compiled contracts, settings, logging, tracing."""
