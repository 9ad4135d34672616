"""The routes, one file for each family: they turn a request into sequences, and the sequences into its response."""
