"""Text-generation servers: their addresses, their health, and requests to them with deadlines."""
