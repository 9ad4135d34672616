"""A template may come from anybody: whatever it computes ends soon, and takes little memory."""

import resource

import pytest

from tgi_server.router.errors import InvalidTemplate
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
USUAL = [
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


@pytest.mark.parametrize("source", HOSTILE)
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
