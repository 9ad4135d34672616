"""Paged attention for the model families that do not go through `AttentionInterface`.

A module of such a family is replaced by one of a subclass that differs in how it attends, with the same weights under
the same names. Each file has a table SUBSTITUTES, or a function `substitute`, from classes of transformers to
what replaces them.
"""
