"""Paged attention for models without a spec whose modules need more than `AttentionInterface`.

A module is replaced by one of a subclass that differs in how it attends, with the same weights under the same names.
Each file has a function `substitute`, from modules to the classes that replace theirs.
"""
