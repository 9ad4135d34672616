"""Models as data: what a decoder is made of, and how it is split among ranks; a file for each family."""
