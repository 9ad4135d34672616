"""Several machines that run one model: their launchers start together and end together."""
