"""Images of prompts: the vision tower of a model, computed in pieces, and the places of its outputs among tokens."""
