"""Answers of models: formats of tool calls and reasoning, grammars of answers, and streaming parsers."""
