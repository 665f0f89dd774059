"""Small templates, our own: every filter, test, method, function and tag that templates use, and where Python and others part."""

CHAT = {
    "messages": [
        {
            "role": "user",
            "content": "Hi",
            "x": ["a", None, {"k": True}],
            "n": 3,
            "f": 2.5,
            "big": 12345678901234567890,
            "list": [3, 1, 2],
            "words": ["b", "A", "c", "a"],
            "people": [{"name": "Ada", "age": 36, "on": True}, {"name": "bob", "age": 7, "on": False}, {"name": "Cy", "age": 36}],
            "map": {"b": 1, "A": 2, "items": 3, "c d": "it's"},
            "text": "The quick (brown) fox's \"den\" <b>&amp;</b>\n  näh\u00a0x\t中🦀\n",
            "empty": "",
            "nothing": None,
        }
    ]
}
EXPRESSIONS = r"""
none
true
[1, 2.0, 'a', none, true, (1,), (), {}, {'a': [1]}]
m.x
m.x | string
m.x ~ m.nothing ~ true ~ 1.0 ~ 1e-7
m.x | join('-')
'%s and %s' % (m.x, 1e16)
'%s' | format(m.x)
"it's" | string
["it's", 'say "x"', 'both \' and "', '\n\t\\\x00\x7fé\u200b😀']
1e-05
[1e15, 1e16, 123456789.123, 0.1 + 0.2, 1.0, -0.0, 1e300 * 1e10, 1e22, 5e-324]
1e300 * 1e300 - 1e300 * 1e300
m.big
m.big + 1
m.f
m.nothing
m.text
m.map
m.missing
m.missing is defined
m.missing.more
missing.more
m['role'], m["content"]
m['missing']
m.map.items
m.map['items']
m.map.items() | list
m.map.items()
m.map.keys()
m.map.values() | list
m.map.keys() | length
m.map.get('b'), m.map.get('z'), m.map.get('z', 0)
m.map.pop('b')
m.list.append(4)
m.list[0], m.list[-1], m.list[5], m.list['a']
m.list[1:], m.list[:-1], m.list[::-1], m.list[::2], m.list[5:], m.list[-2:9]
m.text[4:9], m.text[-3:], m.text[::-1], m.text[0], m.text[-2]
'héllo'[1], 'héllo'[1:3], 'abc'[7] is defined
m.list | sort, m.words | sort, m.words | sort(case_sensitive=true), m.words | sort(reverse=true)
m.people | sort(attribute='age,name') | map(attribute='name') | list
m.people | sort(attribute='name', reverse=true) | map(attribute='name') | join(', ')
m.people | map(attribute='on', default='?') | list
m.people | map(attribute='on') | list
m.words | map('upper') | list
m.words | map('replace', 'a', 'x') | join
m.people | selectattr('on') | list | length
m.people | selectattr('age', 'equalto', 36) | map(attribute='name') | list
m.people | selectattr('age', '>', 10) | map(attribute='name') | list
m.people | rejectattr('on', 'defined') | map(attribute='name') | list
m.people | rejectattr('on') | list
m.list | select('odd') | list, m.list | reject('odd') | list, m.x | select | list, m.x | reject('none') | list
m.x | select('string') | first
m.people | groupby('age') | list
m.people | groupby('age') | map('last') | map('length') | list
none | selectattr('a') | list
none | map('upper') | list
m.list | select('odd') | length
m.people | map(attribute='name')
m.list | sum, m.people | sum(attribute='age'), m.list | sum(start=10)
m.list | min, m.list | max, m.words | min, m.words | max(case_sensitive=true), m.people | max(attribute='age'), [] | max
m.words | unique | list, m.words | unique(case_sensitive=true) | list
m.list | batch(2) | list, m.list | batch(2, 'x') | list, m.list | slice(2) | list, m.list | slice(2, 'x') | list
m.map | dictsort, m.map | dictsort(reverse=true), {'a': 2, 'b': 1} | dictsort(by='value')
m.map | items | list
m.list | first, m.list | last, [] | first is defined, 'abc' | first, 'abc' | last
m.list | reverse | list, 'abc' | reverse
m.list | length, 'näh' | length, m.map | count, m.missing | length
none | length
3 | length
m.map | list, 'abc' | list
m.list | join(', '), m.people | join(', ', attribute='name'), [1, none, 'a'] | join('|')
m.missing | default('d'), m.nothing | default('d'), m.nothing | default('d', true), '' | d('e', boolean=true)
m.text | upper, m.text | lower, m.text | title, m.text | capitalize
m.text.title(), m.text.capitalize(), m.text.swapcase(), "it's x2y".title()
"it's" | title, 'a-b (c) {d} [e] <f> g' | title
m.text | trim, m.text.strip(), '\x1c a \x85' | trim, 'xxaxx' | trim('x')
'  a '.lstrip() ~ '|', '  a '.rstrip() ~ '|', 'xyaxy'.strip('xy'), 'xa'.lstrip('x'), 'ax'.rstrip('x')
m.text | e, m.text | escape, '<a>' | forceescape
('<a>' | e) + '<b>', '<b>' + ('<a>' | safe), ('<a>' | safe) ~ '<b>', ('<a>' | e) | e
('<a>' | safe).replace('a', '<'), ('<' | safe) * 2, ('%s' | safe) % '<', ('<' | safe) | upper
'<a>' | safe, m.map | tojson | safe
m.text | striptags
m.text | wordcount
m.text | replace('o', '0'), m.text | replace('o', '0', 1), 'aaa'.replace('a', 'b', 2), 'ab'.replace('', '-')
m.text | indent, m.text | indent(2, true), m.text | indent('> ', blank=true), 'a\n\nb' | indent(first=true)
'hello world again' | truncate(9), 'hello world again' | truncate(9, true), 'hello world' | truncate(9), 'hello world again' | truncate(9, leeway=0, end='!')
'x' | center(5) ~ '|', 'ab'.center(5) ~ '|', 'ab'.ljust(4, '.'), 'ab'.rjust(4), '-7'.zfill(4), 'a\tb'.expandtabs(4)
'a b/ü?&' | urlencode, {'a b': 1, 'c': '/'} | urlencode
1 | filesizeformat, 13000 | filesizeformat, 4100000000 | filesizeformat(true)
m.map | xmlattr
m.x | pprint
'7' | int, 'x' | int, 'x' | int(5), '0x1f' | int(base=16), '1.9' | int, 3.9 | int, none | int, true | int, '-7' | int, ' 7 ' | int, '1_000' | int
'7.5' | float, 'x' | float, 3 | float, none | float(1.5), '1e3' | float
2.5 | round, 3.5 | round, 42.567 | round(2), 42.567 | round(1, 'floor'), 42.1 | round(method='ceil'), 42 | round, 15 | round(-1)
-3 | abs, -3.5 | abs
m | attr('role'), m.text | attr('upper')
m.x | tojson, m.map | tojson, m.text | tojson, m.f | tojson, 1e-7 | tojson, none | tojson
m.map | tojson(indent=2)
m.x | tojson(indent=4), [] | tojson(indent=2), {} | tojson(indent=2), [[], {}] | tojson(indent=1)
m.map | tojson(sort_keys=true), m.text | tojson(ensure_ascii=true), m.text | tojson(true)
m.map | tojson(separators=(',', ':')), m.x | tojson(indent=2, separators=(';', '='))
{1: 'a', none: 2, true: 3, 1.5: 4} | tojson
(1, 2) | tojson
m.missing | tojson
m.map.items() | tojson
m.x | tojson(indent='\t')
'a,b,c'.split(','), 'a,b,c'.split(',', 1), 'a,b,c'.rsplit(',', 1) | last, ' a  b '.split(), ' a  b c '.split(none, 1), ' a  b c '.rsplit(maxsplit=1)
'a,b'.split('')
'a\nb\r\nc\x0bd'.splitlines(), 'a\nb'.splitlines(true), ''.splitlines()
'a=b=c'.partition('='), 'a=b=c'.rpartition('='), 'abc'.partition('='), 'abc'.removeprefix('a'), 'abc'.removesuffix('c'), 'abc'.removesuffix('x')
'abcabc'.find('c'), 'abcabc'.rfind('c'), 'abc'.find('x'), 'abcabc'.index('b'), 'abcabc'.count('b'), 'näab'.find('b'), 'abcabc'.find('a', 1)
'abc'.index('x')
'abc'.startswith('a'), 'abc'.endswith(('x', 'c')), 'abc'.startswith('b', 1), 'abc'.startswith([])
'-'.join(['a', 'b']), '-'.join('abc')
'-'.join([1])
'a1'.isalnum(), 'a'.isalpha(), '1'.isdigit(), ' '.isspace(), 'A'.isupper(), 'a'.islower(), 'Ab C'.istitle(), ''.isalpha(), 'a_1'.isidentifier(), 'é'.isascii(), '²'.isnumeric(), '1'.isdecimal(), 'a\n'.isprintable()
'{} {1}'.format('a', 'b')
'{} {}'.format('a', 'b'), '{0} {x[k]} {0!r:>5}'.format('a', x={'k': 1}), '{{}}'.format(), '{:05.1f}|{:<4}|{:^5}|{:,}'.format(3.14159, 'a', 'b', 1234567)
'{:x} {:e} {:g} {:%} {:+d}'.format(255, 12345.678, 0.00001, 0.25, 3)
'%d %5.2f %-4s| %05d %x %e %g %r %% %c %+d %i' % (3.9, 2.345, 'a', 42, 255, 12345.678, 1e-5, 'x', 'c', 3, 7)
'%(a)s %(b)d' % {'a': 'x', 'b': 2}
'%s %s' % ('a',)
'%s' % [1]
'%d' % 'a'
'a' 'b' "c"
'\x41\u00e9\101\q\\'
'a' + 1
'a' * 3, 3 * 'a', [1] * 2, 'a' * -1
[1] + [2], (1,) + (2,), [1] + (2,)
7 // 2, -7 // 2, 7 % 3, -7 % 3, 7 / 2, 6 / 2, 2 ** 10, 2 ** -1, 2 ** 0.5, 7.5 // 2, -7.5 % 2
1 / 0
true + true, -true, +1, --1, not 1, not not ''
1 == 1.0, 1 == true, '1' == 1, none == none, [1, 2] == [1, 2], (1,) == [1], {'a': 1} == {'a': 1.0}, m.missing == m.other
1 < 2 < 3, 3 > 2 > 2, 'a' < 'b', [1, 2] < [1, 3], 1 <= 1.0
none < 1
'a' < 1
1 in m.list, 9 not in m.list, 'a' in m.map, 'H' in m.content, 'k' in {'k': 1}.keys(), none in m.x, m.missing in [1], 'a' in m.missing
1 in 'a'
m.missing + 'a'
m.missing ~ 'a', m.missing | string, (m.missing or 'x'), (m.missing and 'x') is defined
'' or none or 0 or [] or 'end', 1 and 2 and 0
'a' if false
'a' if m.n > 2 else 'b', ('a' if false) is defined, 'a' if false else 'b' if false else 'c'
'text' is sequence, m.list is sequence, m.map is sequence, 3 is sequence, none is sequence, m.map.items() is sequence, m.missing is sequence
m.x is iterable, 'a' is iterable, none is iterable, 3 is iterable, m.missing is iterable, range(2) is iterable
m.map is mapping, m.list is mapping, none is mapping, m is mapping
m.n is number, m.f is number, true is number, 'a' is number, m.n is integer, true is integer, m.f is float, 1 is float, true is boolean, 1 is boolean
m.text is string, m.n is string, ('a' | safe) is string
none is none, m.missing is none, m.missing is undefined, m.n is defined, m.nothing is not none, m.nothing is defined
true is true, 1 is true, false is false, 0 is false
3 is odd, 4 is even, 9 is divisibleby 3, 9 is divisibleby(2), 2.5 is odd
1 is eq 1, 1 is equalto 2, 1 is ne 2, 1 is lt 2, 1 is le 1, 3 is gt 2, 3 is ge 3, 1 is lessthan(2), 2 is greaterthan 1, 2 is in [1, 2]
'a' is lower, 'A' is upper, 'tojson' is filter, 'nope' is filter, 'odd' is test, ('a' | e) is escaped, 'a' is escaped
range is callable, m.text.upper is callable, 'a' is callable
none is sameas none, 1 is sameas true, true is sameas true
m.n is not string and m.text is string or false
range(3), range(3) | list, range(5, 0, -2) | list, range(1, 4)[1], range(3) | length, 2 in range(3), range(0) | list
range(100001)
range(1.5)
dict(a=1, b=[2]), dict({'a': 1}, a=2), dict([('a', 1)]), {'a': 1, 'a': 2}
namespace(a=1).a, namespace({'a': 1}).a, namespace(a=1)
namespace(_a=1)
strftime_now('%Y-%m-%d'), strftime_now('%d %b %Y %H:%M:%S %p %I %j %y %A %B %a %%'), strftime_now('%-d. %-m. %e %U %W %w %u %x %X %c %F %T %D %R'), strftime_now('%f %C %h %k %l %r %R %n%t%G %V %g [%z%Z] %-I %-H %-j'), strftime_now('100% of %Q and %')
strftime_now is defined, raise_exception is defined, lipsum is defined
raise_exception('no ' ~ m.n)
missing()
m.text.nope()
m.nothing.x
m.nothing['x'], m.nothing.x is defined, 3.x is defined
m.__class__
m.text.__class__ is defined
m.role.upper().lower().strip()
(m.list)[0]
m . role
m.list.0
m.list | nope
m.list is nope
m.n | string | length
{'a': {'b': {'c': 1}}}.a.b.c
[1, [2, [3]]] | string
{'a': 'é', 1: none, (1, 2): true}
{[1]: 2}
(1, 'a', none)
1_000, 0x1F, 0b11, 0o17, 1.5e3, 1E-3, 2e+2
[1, 2,], {'a': 1,}, (1, 2,)
m.list.index(1), m.list.count(3), (1, 1).count(1)
'abc' is in 'xabcx'
m.missing | list, m.missing | join, m.missing | upper, m.missing | tojson(indent=2) is defined
loop is defined
caller is defined
bos_token ~ eos_token, image_token, mask_token is defined
add_generation_prompt, tools, documents, messages | length
messages[0].content, messages[-1]['role'], messages | map(attribute='role') | list
messages | string | length
(messages | tojson) == (messages | tojson(ensure_ascii=false))
messages[1] is defined, messages[1:] | length, messages[::-1][0].role
cycler('a', 'b').next()
2.0, 100.0, 1.10, 3.0e0, 12e-1
m.words | join(d='/')
m.words | map('default') | list | string
m.f.is_integer(), 2.0.is_integer()
'ß'.upper(), 'İ'.lower(), 'ΑΣ'.lower(), 'ﬁ' | upper, 'ǆ' | upper
'a' ~ 'b' ~ 1 + 2 ~ 'c'
-1 ** 2, (-1) ** 2, 2 ** 3 ** 2
1 + 2 * 3 - 4 / 2 // 1 % 5
not m.missing, not m.list == [3, 1, 2]
'a' not in 'b', not 'a' in 'a'
m is defined and m.role == 'user' and 'content' in m and m['content'] is string
m.people[0].name, m.people[0]['name'] ~ m.people[-1].age
m.people | map(attribute='name') | map('lower') | sort | join(',')
"{%- raw -%}" ~ '}}' ~ "{{"
(3 | map('upper')) is defined, (none | items) is defined, ('ab' | select('gt', 1)) is defined, (m.x | unique) is defined
3 | map('upper') | list
'ab' | rejectattr('a', 'lt', 1) | first
m.nothing[1:], m.n[:2], m.map[1:], m.missing[:1], (m.x | map('string'))[1:]
[1, 2] | slice(2, 'x') | list, '' | slice(2, 'x') | list
'12' % m.x, '12' % m.missing, ('<i>' | safe) % m.x, '12' % (1,), '12' % 'a', '12' % range(2)
'%c' % true, '%c' % '', '%c' % 'é'
m.x | truncate(5), m.n | truncate(5), m.missing | truncate(5), m.map | truncate(2, leeway=0)
[] is filter, {} is test, 1 is filter, (1,) is test, ([],) is filter, range(2) is test, m.map.items() is filter
(1, []) in m.map, (1, 2) in m.map, range(2) in m.map, {range(2): 1}, m.map.get(([],)), m.map.get((1,), 'd'), {(1, {}): 2}, [(1, []), (1, [])] | unique | list
('<i>' | safe) | list, ('<i>' | safe) | first, ('<i>' | safe)[0]
'1.5'.startswith('', 9), '1.5'.endswith('', 9), 'a'.find('', 2), 'a'.count('', 2), 'abc'.find('', 2, 1), 'abc'.rfind('', 1, 9), 'abc'.index('', 9)
m.missing | attr('a'), m.nothing | attr('a')
'ß' | capitalize, 'ßa'.capitalize(), 'ß b' | title, '%d|%5d|%+d' % (-0.5, -0.5, -1.5)
""".strip().split("\n")
TEMPLATES = [
    "{% if tools is iterable and tools | length > 0 %}T{% endif %}{{ messages[0].content }}",
    "{% for x in none %}x{% endfor %}",
    "{% for x in missing %}x{% else %}none{% endfor %}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{% set a = 1 %}{% generation %}{% set a = 2 %}{{ a }}{% endgeneration %}{{ a }}",
    "{% set x = 0 %}{% for i in [1, 2] %}{% set x = x + i %}{{ x }}{% endfor %}{{ x }}",
    "{% set ns = namespace(x=0) %}{% for i in [1, 2] %}{% set ns.x = ns.x + i %}{% endfor %}{{ ns.x }}",
    "{% for i in range(6) %}{% if i == 1 %}{% continue %}{% elif i == 4 %}{% break %}{% endif %}{{ i }}{{ loop.first }}{{ loop.last }}{% endfor %}",
    "{% for a in 'ab' %}{% set outer = loop %}{% for b in [1, 2] %}{{ outer.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.length }};{% endfor %}{% endfor %}",
    "{% for a in [1, 2, 3] %}{{ loop.previtem }}{{ loop.nextitem }}{{ loop.cycle('x', 'y') }}{{ loop.changed(a // 2) }}{{ loop.depth }}{% endfor %}",
    "{% for k, v in messages[0].map.items() %}{{ k }}={{ v }};{% endfor %}{% for k in messages[0].map %}{{ k }}{% endfor %}",
    "{% for k, v in messages[0].map | dictsort %}{{ k }}={{ v }};{% endfor %}",
    "{% for a, b in [[1, 2], (3, 4)] %}{{ a }}{{ b }}{% endfor %}",
    "{% for a, b in [[1, 2, 3]] %}{{ a }}{% endfor %}",
    "{% for a in [1, 2, 3, 4] if a is odd %}{{ a }}{{ loop.index }}{{ loop.length }}{% else %}none{% endfor %}",
    "{% for a in [[1, [2, []]], [3]] recursive %}{% if a is iterable %}({{ loop(a) }}){% else %}{{ a }}{{ loop.depth }}{% endif %}{% endfor %}",
    "{% macro f(a, b=2, c='x') %}{{ a }}{{ b }}{{ c }}{% endmacro %}{{ f(1) }}{{ f(1, c='y') }}{{ f() }}{{ f(1, 2, 3) | upper }}",
    "{% macro f(a) %}{{ a }}{% endmacro %}{{ f(1, 2) }}",
    "{% macro f(a) %}{{ a }}{% endmacro %}{{ f(b=2) }}",
    "{% macro f() %}{{ varargs }}{{ kwargs }}{{ varargs | length }}{% endmacro %}{{ f(1, 2, a=3) }}",
    "{% macro f(x) %}<{{ caller(x) }}>{% endmacro %}{% call(y) f(1) %}{{ y + 1 }}{% endcall %}",
    "{% macro f() %}{{ caller() }}{% endmacro %}{% call f() %}a{% endcall %}",
    "{% macro f() %}x{% endmacro %}{% call f() %}a{% endcall %}",
    "{% macro f(n) %}{{ n }}{% if n > 0 %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(5) }}",
    "{% macro f() %}{{ y }}{% endmacro %}{% set y = 1 %}{{ f() }}{% for y in [2] %}{{ f() }}{% endfor %}",
    "{% macro f() %}{% set z = 1 %}{{ z }}{% endmacro %}{{ f() }}{{ z is defined }}{{ f.name }}",
    "{% macro f(a) %}{{ a }}{% endmacro %}{{ f(*[1]) }}{{ f(**{'a': 2}) }}",
    "{% set x %}a{{ 1 }}b{% endset %}{{ x }}{{ x | length }}",
    "{% set x | upper | replace('A', 'z') %}abc{% endset %}{{ x }}",
    "{% set a, b = 1, 2 %}{{ a }}{{ b }}{% set (c, d) = [3, 4] %}{{ c }}{{ d }}{% set t = 1, 2 %}{{ t }}",
    "{% filter upper | trim %} a{{ 'b' }} {% endfilter %}",
    "{% with a = 1, b = 2 %}{{ a }}{{ b }}{% set c = 3 %}{% endwith %}{{ a is defined }}{{ c is defined }}",
    "{% if false %}{% set q = 1 %}{% endif %}{{ q is defined }}{% if true %}{% set q = 2 %}{% endif %}{{ q }}",
    "{% block title %}{{ messages[0].role }}{% endblock %}{% block b %}x{% endblock b %}",
    "{% raw %}{{ x }}{% if %}{% endraw %}{%- raw -%}  a  {%- endraw -%}  b",
    "a{# comment #}b{#- c -#}  d\n{# e #}\nf",
    "  {% if true %}  \n  a\n  {% endif %}\n  b  {%- if true -%}  c  {%- endif +%}\n d",
    "a\n   {%+ if true %}b{% endif %}\n\n{{ 'c' -}}  \n d {{- 'e' }}",
    "a  \n {%- set x = 1 -%} \n b{% set y = 2 %}\n\n c",
    "line\r\nnext\r{% if true %}\r\nx{% endif %}\r\n",
    "a\n", "a\n\n", "", "\n", "{{ 'a' }}\n\n", "{% if true %}{% endif %}\n",
    "{{ '%}' }}{{ '}}' }}{{ {'a': {'b': 1}}['a'] }}{{ {}}}",
    "{{ 1 }}{{- 2 }}{{ -3 }}{{+4 }}{{ 5 -}} 6",
    "{{ 'a' }", "{% if %}", "{% endif %}", "{% for x %}", "{{ 1 + }}", "{% nope %}", "{{ a b }}", "{# x", "{% raw %}", "{{ 'a }}", "{% if x %}", "{{ (1 }}", "{{ 1 ) }}", "{{ }}", "{% set x %}", "{% set none = 1 %}", "{{ x is }}", "{{ x | }}", "{% break %}",
    "{% include 'x' %}", "{% extends 'x' %}", "{% import 'x' as y %}", "{% from 'x' import y %}", "{% if false %}{% include 'x' %}{% endif %}ok",
    "{% set ns = namespace() %}{% set ns.a = [1] %}{% set ns.b = ns.a + [2] %}{{ ns.b }}{{ ns.c is defined }}{{ ns }}",
    "{% set x = {'a': 1} %}{% set x.a = 2 %}",
    "{% set j = joiner(', ') %}{% for a in [1, 2, 3] %}{{ j() }}{{ a }}{% endfor %}",
    "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.current }}{{ c.next() }}{{ c.next() }}{{ c.reset() }}{{ c.current }}",
    "{% set g = [1, 2, 3] | select('odd') %}{{ g | list }}{{ g | list }}{{ g is iterable }}{{ g is sequence }}",
    "{% set g = [1, 2] | map('string') %}{{ g | first }}{% for x in g %}{{ x }}{{ loop.length }}{% endfor %}",
    "{% print 1 + 2 %}{% autoescape false %}{{ '<' }}{% endautoescape %}",
    "{% for i in range(3) %}{% set last = i %}{% endfor %}{{ last is defined }}{{ i is defined }}",
    "{% for m in messages %}{{ loop.index }}{% set messages = [] %}{{ messages }}{% endfor %}{{ messages | length }}",
    "{% set messages = messages[1:] %}{{ messages }}{% set tools = 1 %}{{ tools }}",
    "{%- for message in messages %}\n    {%- if message.role == 'user' %}\n        {{- '<u>' + message.content + '</u>' }}\n    {%- endif %}\n{%- endfor %}",
    "{% if x is defined if y %}a{% endif %}",
    "{% for x in [1, 2] if true else [3] %}{{ x }}{% endfor %}",
    "{% for x in 1, 2 %}{{ x }}{% endfor %}{{ 1, 2 }}{% if 0, %}tuple{% endif %}",
    "{% set a = 'x' if false %}{{ a is defined }}{{ a }}",
    "{%set a=1%}{{a}}{%if a==1%}y{%else%}n{%endif%}",
    "{{ loop }}{% for a in [1] %}{{ loop is defined }}{{ loop }}{% endfor %}",
    "{% for a in [] %}{% else %}{{ loop is defined }}{% endfor %}",
    "{% for a in [1] %}{% macro f() %}{{ a }}{% endmacro %}{{ f() }}{% endfor %}",
    "{% macro outer() %}{% macro inner() %}in{% endmacro %}{{ inner() }}out{% endmacro %}{{ outer() }}",
    "{{ 'Today ' + strftime_now('%Y-%m-%d') }}",
    "{% set d = {} %}{{ d.update({'a': 1}) }}",
    "{{ [1, 2].append(3) }}", "{{ [].sort() }}",
    "{% for c in 'aé🦀' %}{{ c }}-{% endfor %}{% for i in {'a': 1} %}{{ i }}{% endfor %}",
    "{% for i in 3 %}{% endfor %}", "{% for i in true %}{% endfor %}",
    "{% for k in range(2) %}{{ k }}{% endfor %}{% for k in (1, 2) | reverse %}{{ k }}{% endfor %}",
    "{{ messages[0]['content'] | trim ~ '!' }}{{- '\\n' -}} x",
    "{% set x = messages[0] %}{{ x.role ~ x['content'] }}{{ x.get('content') }}{{ x.get('no', 'd') }}{{ x.items() | list | length }}",
    "{% for tool in tools or [] %}{{ tool }}{% endfor %}{% if not tools %}no{% endif %}",
    "{{ '' if tools else 'none' }}{{ tools is none }}{{ tools is not none and tools | length > 0 }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ messages | selectattr('role', 'in', ['user', 'x']) | map(attribute='content') | join }}",
    "{% set parts = ('a', 'b') %}{{ parts | join(' ') }}{{ parts[0] }}{{ parts is sequence }}{{ parts }}",
]


def snippets():
    for expression in EXPRESSIONS:
        yield "{% set m = messages[0] %}{{ " + expression + " }}", CHAT
    # Each part separately, because one refusal hides the others.
    for expression in EXPRESSIONS:
        parts = split(expression)
        if len(parts) > 1:
            for part in parts:
                yield "{% set m = messages[0] %}{{ " + part + " }}", CHAT
    for template in TEMPLATES:
        yield template, CHAT


def split(expression):
    """The parts between commas outside brackets and strings."""
    parts, depth, quote, escaped, start = [], 0, None, False, 0
    for at, char in enumerate(expression):
        if quote:
            quote = None if char == quote and not escaped else quote
            escaped = char == "\\" and not escaped
        elif char in "'\"":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(expression[start:at].strip())
            start = at + 1
    return [*parts, expression[start:].strip()]
