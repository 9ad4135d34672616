"""Images of requests: fetched, decoded and processed within bounds."""
