"""JSON schemas as people write them, in the keywords that llguidance enforces exactly.

`document.py` reads a schema and finds what its references name. `translation.py` is the way through it: each keyword
is taken as it is, or said in other keywords, or cannot be enforced. What it writes allows nothing that the schema
forbids, though at times less than the schema allows. `negation.py` and `disjointness.py` are the logic behind `not`,
`if` and `oneOf`. `simple.py` knows the schemas that cannot be costly.
"""

from tgi_server.grammar.json_schema.formats import FORMATS
from tgi_server.grammar.json_schema.keywords import JSON_LAYOUT
from tgi_server.grammar.json_schema.simple import is_simple
from tgi_server.grammar.json_schema.translation import KEYWORDS, MOST_LENIENT, EnforcedSchema, enforced_schema

__all__ = ["FORMATS", "JSON_LAYOUT", "KEYWORDS", "MOST_LENIENT", "EnforcedSchema", "enforced_schema", "is_simple"]
