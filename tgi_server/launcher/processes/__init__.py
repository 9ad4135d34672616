"""Child processes: starting, listening to, and stopping them."""
