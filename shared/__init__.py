"""Shared by both services: compiled contracts, settings, logging, tracing, signals, the watch over event loops."""
