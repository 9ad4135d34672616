"""Translates JSON schemas to the keywords that llguidance enforces exactly.

`document.py` reads a schema and resolves references. `translation.py` walks through it: each keyword is copied,
rewritten with other keywords (`rewriting.py`), or refused. The result allows nothing that the schema forbids, but may
allow less than the schema does. `negation.py` and `disjointness.py` are the logic for `not`, `if` and `oneOf`.
`simple.py` recognizes schemas that are cheap to compile.
"""

from tgi_server.grammar.json_schema.formats import FORMATS
from tgi_server.grammar.json_schema.keywords import JSON_LAYOUT
from tgi_server.grammar.json_schema.simple import is_simple
from tgi_server.grammar.json_schema.translation import KEYWORDS, MOST_LENIENT, EnforcedSchema, enforced_schema

__all__ = ["FORMATS", "JSON_LAYOUT", "KEYWORDS", "MOST_LENIENT", "EnforcedSchema", "enforced_schema", "is_simple"]
