"""Paged attention for the model families that do not go through `AttentionInterface`.

A module of such a family is replaced by one of a subclass that differs in how it attends, with the same weights under
the same names. SUBSTITUTES of each file, or its function `substitute`, says what takes the place of which class.
"""
