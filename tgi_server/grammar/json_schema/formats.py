"""The formats of JSON Schema 2020-12 (Validation, chapter 7.3), as schemas that llguidance enforces.

Where a format has forms that few texts use (international host names, quoted mail addresses), only the plain ones are
written.
"""

from typing import Any

# llguidance's own dates know no leap years, and have a year 0.
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DAY = "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
_YEAR = "([1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_DATE = f"({_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"

# RFC 3986, 4.2: a reference without a scheme, whose first part has no colon.
_CODED = "%[0-9A-Fa-f]{2}"
_SEGMENT_CHARACTER = rf"([A-Za-z0-9._~!$&'()*+,;=:@-]|{_CODED})"
_FIRST_CHARACTER = rf"([A-Za-z0-9._~!$&'()*+,;=@-]|{_CODED})"
_QUERY = rf"([A-Za-z0-9._~!$&'()*+,;=:@/?-]|{_CODED})*"
_RELATIVE = (
    rf"^(/({_SEGMENT_CHARACTER}+(/{_SEGMENT_CHARACTER}*)*)?|{_FIRST_CHARACTER}+(/{_SEGMENT_CHARACTER}*)*)?"
    rf"(\?{_QUERY})?(#{_QUERY})?$"
)
# RFC 6570.
_VARIABLE = rf"([A-Za-z0-9_]|{_CODED})(\.?([A-Za-z0-9_]|{_CODED}))*(:[1-9][0-9]{{0,3}}|\*)?"
_TEMPLATE = rf"^([A-Za-z0-9._~!$&()*+,;=:@/?#\[\]-]|{_CODED}|\{{[+#./;?&]?{_VARIABLE}(,{_VARIABLE})*\}})*$"
# RFC 6901.
_POINTER = "(/([^/~]|~[01])*)*"
# Regular expressions without nested groups, in the syntax that all dialects share.
_SET = r"\[\^?([A-Za-z0-9 _.,:;]|[a-z]-z|[A-Z]-Z|[0-9]-9)+\]"
_ATOM = rf"([A-Za-z0-9 _,:;<>=!@#%&'/~-]|\\[dDwWsS.^$*+?()\[\]{{}}|/\\-]|\.|{_SET})"
_REPEATED = rf"{_ATOM}([*+?]|\{{[0-9]\}})?"
_GROUP = rf"\((\?:)?({_REPEATED})+(\|({_REPEATED})+)*\)([*+?]|\{{[0-9]\}})?"
_REGEX = rf"^\^?({_REPEATED}|{_GROUP})*\$?$"

_URI_REFERENCE = {"anyOf": [{"format": "uri"}, {"pattern": _RELATIVE}]}
# No label has hyphens as its third and fourth character: these mark international names (RFC 5891, 4.2.3.1).
_LABEL = r"([^.]{0,3}|[^.]{2}([^.-][^.]|[^.][^.-])[^.]*)"
_HOSTNAME = {"format": "hostname", "maxLength": 253, "pattern": rf"^{_LABEL}(\.{_LABEL})*$"}

FORMATS: dict[str, dict[str, Any]] = {
    "date": {"pattern": f"^{_DATE}$"},
    "time": {"pattern": f"^{_TIME}$"},
    "date-time": {"pattern": f"^{_DATE}T{_TIME}$"},
    "duration": {"format": "duration"},
    "email": {"format": "email"},
    "idn-email": {"format": "email"},
    "hostname": _HOSTNAME,
    "idn-hostname": _HOSTNAME,
    "ipv4": {"format": "ipv4"},
    "ipv6": {"format": "ipv6"},
    "uri": {"format": "uri"},
    "iri": {"format": "uri"},
    "uri-reference": _URI_REFERENCE,
    "iri-reference": _URI_REFERENCE,
    "uri-template": {"pattern": _TEMPLATE},
    "uuid": {"format": "uuid"},
    "json-pointer": {"pattern": f"^{_POINTER}$"},
    "relative-json-pointer": {"pattern": f"^(0|[1-9][0-9]*)(#|{_POINTER})$"},
    "regex": {"pattern": _REGEX},
}
