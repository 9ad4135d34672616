"""Text-generation servers: where they are, whether they are well, and requests to them that end in time."""
