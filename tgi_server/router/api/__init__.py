"""The HTTP routes: one file for each family, and what they share."""
