"""The model as the services see it: it always answers in time, if need be with nothing."""
