"""The model in the view of the services: there is always an answer in time, which may be empty."""
