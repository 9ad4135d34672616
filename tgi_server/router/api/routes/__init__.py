"""The routes: one file for each family, each turns a request into sequences, and those into its response."""
