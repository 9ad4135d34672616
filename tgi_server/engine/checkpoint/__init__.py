"""Reading a model from the files of its folder: whole or one rank's part, with quantised weights as they are stored."""
