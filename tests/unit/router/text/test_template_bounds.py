"""A template may come from anybody: whatever it computes ends soon, and takes little memory."""

import resource

import pytest

from tgi_server.router.errors import InvalidTemplate, StartupError
from tgi_server.router.text import template_allowance
from tgi_server.router.text.chat_template import ChatTemplate
from tgi_server.router.text.tokenizer_config import TokenizerConfig

HELLO = [{"role": "user", "content": "Hello\n\tall"}]
TWICE = "{% set n = namespace(x='ab', l=['a']) %}{% for i in range(60) %}"
HOSTILE = [
    "{{ 9 ** (9 ** 9) }}",
    "{% set n = 9 ** 9 %}{{ (n ** n) % 7 }}",
    "{% set n = namespace(x=3) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}{{ n.x }}",
    "{{ 'a' * 9 ** 9 }}",
    "{{ 10 ** 10 * 'a' }}",
    "{{ [0] * 9 ** 9 }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '%*d' % (999999999, 1) }}",
    "{{ '%.999999999f' % 1.5 }}",
    "{{ '{:999999999}'.format(1) }}",
    "{{ '{:{}}'.format(1, 999999999) }}",
    "{{ '{a:999999999}'.format(a=1) }}",
    "{{ '%999999999d'|format(1) }}",
    "{{ 'a'.center(999999999) }}",
    "{{ 'a'.ljust(999999999) }}",
    "{{ 'a'.zfill(999999999) }}",
    "{{ '\t'.expandtabs(999999999) }}",
    "{{ 'a'|center(999999999) }}",
    "{{ 'a\nb'|indent(999999999) }}",
    "{{ 'a\nb'|indent(width=999999999) }}",
    "{{ messages|tojson(indent=999999999) }}",
    "{{ messages|tojson(indent='a' * 9999) }}",
    "{{ [1]|batch(999999999, 'x')|list }}",
    "{{ lipsum(n=999999999) }}",
    f"{TWICE}{{% set n.x = n.x + n.x %}}{{% endfor %}}",
    f"{TWICE}{{% set n.x = n.x ~ n.x %}}{{% endfor %}}",
    f"{TWICE}{{% set n.x = n.x.replace('a', n.x) %}}{{% endfor %}}",
    f"{TWICE}{{% set n.x = n.x|replace('a', n.x) %}}{{% endfor %}}",
    f"{TWICE}{{% set n.x = n.x.join([n.x, n.x, n.x]) %}}{{% endfor %}}",
    f"{TWICE}{{% set n.x = [n.x, n.x, n.x]|join(n.x) %}}{{% endfor %}}",
    f"{TWICE}{{% set n.x = '%s%s' % (n.x, n.x) %}}{{% endfor %}}",
    f"{TWICE}{{% set n.x = '%(a)s%(a)s' % {{'a': n.x}} %}}{{% endfor %}}",
    f"{TWICE}{{% set n.x = '{{0}}{{0}}'.format(n.x) %}}{{% endfor %}}",
    f"{TWICE}{{% set n.l = n.l + n.l %}}{{% endfor %}}",
    f"{TWICE}{{% set n.l = [n.l, n.l] %}}{{% endfor %}}{{{{ n.l }}}}",
    pytest.param(f"{TWICE}{{% set n.l = [n.l, n.l] %}}{{% endfor %}}{{{{ n.l ~ '' }}}}", marks=pytest.mark.slow),
    pytest.param(f"{TWICE}{{% set n.l = [n.l, n.l] %}}{{% endfor %}}{{{{ n.l|string }}}}", marks=pytest.mark.slow),
    pytest.param(f"{TWICE}{{% set n.l = [n.l, n.l] %}}{{% endfor %}}{{{{ n.l|tojson }}}}", marks=pytest.mark.slow),
    pytest.param(f"{TWICE}{{% set n.l = [n.l, n.l] %}}{{% endfor %}}{{{{ '%s' % (n.l,) }}}}", marks=pytest.mark.slow),
]
# Two lists of the same members, each of which contains the last one twice.
NESTED = (
    "{% set a = namespace(x=('a',)) %}{% set b = namespace(x=('a',)) %}{% for i in range(60) %}"
    "{% set a.x = (a.x, a.x) %}{% set b.x = (b.x, b.x) %}{% endfor %}"
)
LONG = "{% set x = 'a' * 1000000 %}"
UNBOUNDED = [
    "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
    "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
    "{% for a in [[]] recursive %}{{ loop([[]]) }}{{ loop([[]]) }}{% endfor %}",
    f"{TWICE}{{% set y %}}{{{{ n.x }}}}{{{{ n.x }}}}{{% endset %}}{{% set n.x = y %}}{{% endfor %}}",
    f"{{% macro m(x) %}}{{{{ x }}}}{{{{ x }}}}{{% endmacro %}}{TWICE}{{% set n.x = m(n.x) %}}{{% endfor %}}",
    f"{TWICE}{{% set y | upper %}}{{{{ n.x }}}}{{{{ n.x }}}}{{% endset %}}{{% set n.x = y %}}{{% endfor %}}",
    f"{TWICE}{{% set n.x = n.x.translate({{98: n.x, 97: n.x}}) %}}{{% endfor %}}",
    "{{ _allowance.take(-9e9) }}{{ 'a' * 9 ** 9 }}",
    "{{ 'a'.encode().center(999999999) }}",
    "{{ (1).to_bytes(999999999, 'big') }}",
    "{{ ['a']|map('center', 999999999)|list }}",
    "{{ ['a']|map('unbounded_center', 999999999)|list }}",
    f"{TWICE * 5}{{% set n.l = [n.l] %}}{'{% endfor %}' * 5}{{{{ n.l }}}}",
    "{{ 3|round(999999999, 'ceil') }}",
    "{{ ('1' * 9000000)|int(0, 16) }}",
    "{{ ('a' * 9000000).rfind('b' + 'a' * 3000000) }}",
    "{{ ('a' * 9000000).strip('b' * 3000000 + 'a') }}",
    "{{ ('a ' * 30000000).split() }}",
    "{{ ('a\n' * 100000)|indent('x' * 100000) }}",
    "{{ ('a' * 100000)|replace(old='a', new='b' * 100000) }}",
    "{{ strftime_now('%Y' * 99999) }}",
    "{{ ([[1] * 1000] * 1000)|sum(start=[]) }}",
    f"{LONG}{{% set n = namespace(l=[]) %}}{{% for i in range(99999) %}}{{% set n.l = n.l + [x[1:]] %}}{{% endfor %}}",
    f"{LONG}{{{{ ''.join([x] * 1000) }}}}",
    f"{LONG}{{{{ ''.join(([x] * 1000)|map('upper')) }}}}",
    f"{LONG}{{{{ ([x] * 1000)|string }}}}",
    f"{NESTED}{{{{ a.x == b.x }}}}",
    f"{NESTED}{{{{ a.x is eq(b.x) }}}}",
    f"{NESTED}{{{{ [a.x, b.x]|sort }}}}",
    f"{NESTED}{{{{ [a.x].index(b.x) }}}}",
    f"{NESTED}{{{{ {{a.x: 1}} }}}}",
    f"{NESTED}{{{{ {{}}[a.x] }}}}",
    f"{NESTED}{{{{ a.x|upper }}}}",
    f"{NESTED}{{{{ a }}}}",
    "{% for i in range(99999) %}{% for j in range(99999) %}" + "x" * 10_000 + "{% endfor %}{% endfor %}",
]
# Templates that cannot be compiled, or in no time.
UNUSABLE = [
    "{% if a %}" * 3_000 + "{% endif %}" * 3_000,
    "{% for a in b %}" * 50 + "{% endfor %}" * 50,
    "{{ " + "(" * 3_000 + "1" + ")" * 3_000 + " }}",
    "{{ " + "9" * 5_000 + " }}",
    "{{ a" + "|string" * 3_000 + " }}",
    "x" * 300_000,
    "{% autoescape true %}{% endautoescape %}",
    "{{ a|pprint }}",
]
USUAL = [
    ("{% macro m(n) %}{{ n }}{% if n %}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(9) }}", "9876543210"),
    ("{% for a in [[[]]] recursive %}<{{ loop(a) }}>{% endfor %}|{{ 'a\nb'.splitlines() }}", "<<>>|['a', 'b']"),
    (
        "{% set y %}a{{ 1 }}{% endset %}{{ y }}|{% filter upper %}b{% endfilter %}|{{ 'ab'.translate({97: 'x'}) }}",
        "a1|B|xb",
    ),
    (
        "{{ 'abc'[1:] }}{{ 'abc'[::-1] }}{{ [1, 2][:1] }}|{{ 1 in [1] and 'a' not in 'b' }}|{{ 2 < 3 <= 3 }}",
        "bccba[1]|True|True",
    ),
    ("{{ {'a': {'b': 1}}.items()|list }}|{{ {'b': 1, 'a': 2}|dictsort }}", "[('a', {'b': 1})]|[('a', 2), ('b', 1)]"),
    ("{{ '<'|e }}{{ '<'|safe }}|{{ 2.567|round(1) }}|{{ '12'|int + 1 }}|{{ [3, 1]|sort|first }}", "&lt;<|2.6|13|1"),
    ("{{ messages|selectattr('role', 'equalto', 'user')|list|length }}|{{ 'a b'.split()|join('-') }}", "1|a-b"),
    ("{{ 2 ** 10 * 3 + 7 % 4 }}", "3075"),
    ("{{ 'ab' * 3 + 'c' ~ 1 ~ none }}", "abababc1None"),
    ("{{ [1] + [2] * 2 }}", "[1, 2, 2]"),
    ("{{ '%s is %d' % ('a', 3) }}|{{ '%5.1f' % 2.25 }}|{{ '{} {x:>4}'.format(1, x='b') }}", "a is 3|  2.2|1    b"),
    ("{{ 'a-b'.replace('-', '+') }}|{{ 'a-b'|replace('-', '+') }}|{{ 'a-a'|replace('a', 'b', 1) }}", "a+b|a+b|b-a"),
    ("{{ ', '.join(['a', 'b']) }}|{{ ['a', 'b']|join(', ') }}|{{ 'abc'|join('-') }}", "a, b|a, b|a-b-c"),
    ("{{ messages|map(attribute='role')|join }}|{{ 'a\nb'|indent(2) }}|{{ 'a'|center(3) }}", "user|a\n  b| a "),
    ("{{ {'a': [1, 'é']}|tojson }}|{{ [1]|tojson(indent=1) }}|{{ 3|string }}", '{"a": [1, "é"]}|[\n 1\n]|3'),
    ("{{ 'x'.ljust(3) }}|{{ '7'.zfill(3) }}|{{ 'a b'.split(' ') }}|{{ 'ab'[::-1] }}", "x  |007|['a', 'b']|ba"),
    (
        "{% macro m(x) %}{{ x ~ '!' }}{% endmacro %}{{ m('a') }}{% for a in [1, 2]|batch(2)|list %}{{ a }}{% endfor %}",
        "a![1, 2]",
    ),
]


def rendered(source: str) -> str:
    return ChatTemplate(TokenizerConfig(chat_templates={"default": source})).render(HELLO, None)


@pytest.mark.parametrize("source", [*HOSTILE, *UNBOUNDED])
def test_what_would_take_gigabytes_or_hours_is_refused(source: str):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InvalidTemplate):
        rendered(source)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB


@pytest.mark.parametrize(("source", "text"), USUAL)
def test_what_templates_do_is_done_as_ever(source: str, text: str):
    assert rendered(source) == text


def test_a_text_may_grow_by_every_message():
    source = "{% set n = namespace(x='') %}{% for m in messages %}{% set n.x = n.x ~ m.content %}{% endfor %}{{ n.x }}"
    template = ChatTemplate(TokenizerConfig(chat_templates={"default": source}))
    messages = [{"role": "user", "content": "rice " * 100}] * 500
    assert template.render(messages, None) == "rice " * 50_000


@pytest.mark.parametrize("source", UNUSABLE, ids=range(len(UNUSABLE)))
def test_a_template_that_cannot_be_compiled_is_refused_with_one_line(source: str):
    with pytest.raises(StartupError, match=r"^the model's chat template .*$"):
        rendered(source)


def test_calls_without_an_end_take_no_more_time_than_loops(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(template_allowance, "RENDER_SECONDS", 0.2)
    with pytest.raises(InvalidTemplate, match=r"0\.2 s"):
        rendered("{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}")


def test_half_a_character_is_refused():
    with pytest.raises(InvalidTemplate, match="surrogates"):
        rendered(r"{{ '\ud800' }}")
