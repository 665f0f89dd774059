"""Random templates out of what chat templates use, the same ones in every run: they find where Python and semmoe differ on unusual values."""
import random

from snippets import CHAT

VARIABLES = "m.x m.n m.f m.big m.list m.words m.people m.map m.text m.empty m.nothing m.missing m.role m messages tools bos_token".split()
ATOMS = VARIABLES + """
none true false 0 1 2 3 7 2.5 1e-5 1e20 'a' '' 'Ab_c' '12' 'x,y,z' '\\tpad\\n' 'näh🦀' "it's" '{}' '<a&b>' 'a\\nb\\n\\nc' 'ß' '1.5' '-3'
[] [1,2,3] ['b','a','C'] [[1,2],[3]] (1,'a') {} {'a':1,'b':[2]} range(3) m.map.items() m.list|map('string') ('<i>'|safe) m.people|groupby('age') dict(a=1)
""".split()
FILTERS = """
abs attr('role') batch(2) batch(2,'x') capitalize center(9) default('d') default('d',true) d(0) dictsort dictsort(true) dictsort(by='value')
dictsort(reverse=true) e escape first float float(1.5) forceescape groupby('age') indent indent(2,true) indent('--',blank=true) int int(3) items join
join(',') join('-','name') last length list lower map('upper') map(attribute='name') map(attribute=0) map('int') map('length') map('default','z')
map(attribute='zz',default='q') max min max(attribute='age') min(case_sensitive=true) reject('none') reject('string') rejectattr('on')
rejectattr('age','lt',10) replace('a','b') replace('a','b',1) replace('','-') reverse round round(1) round(0,'floor') round(1,'ceil') safe select
select('string') select('gt',1) select('in',[1,'a']) selectattr('on') selectattr('name','eq','Ada') slice(2) slice(3,'x') sort sort(reverse=true)
sort(case_sensitive=true) sort(attribute='name') string striptags sum sum(attribute='age') sum(start=1.5) title tojson tojson(indent=2)
tojson(ensure_ascii=true) tojson(sort_keys=true) trim trim('a') truncate(5) truncate(5,true,'') truncate(8,false,'..',1) unique unique(attribute='age')
unique(true) upper urlencode wordcount count
""".split()
METHODS = """
upper() lower() title() capitalize() swapcase() strip() lstrip() rstrip() strip('a') split() split(',') split(',',1) split(maxsplit=1) rsplit(',',1)
splitlines() splitlines(true) partition(',') rpartition('a') replace('a','X') replace('a','X',1) startswith('a') startswith(('a','m')) endswith('c')
find('a') rfind('a') find('a',1) find('a',-3,9) index('a') count('a') count('') join(['p','q']) join(m.words) format('v') zfill(5) ljust(6,'.') rjust(6)
center(7,'*') isdigit() isalpha() isalnum() isspace() isupper() islower() istitle() isnumeric() isdecimal() isidentifier() isascii() isprintable() items()
keys() values() get('a') get('a',0) get('zz','d') copy() expandtabs(2) removeprefix('a') removesuffix('c') casefold() startswith('',9)
""".split()
TESTS = """
defined undefined none string number integer float boolean mapping sequence iterable callable odd even divisibleby(3) eq(1) ne(none) gt(1) le(1)
in([1,'a']) in(m.map) sameas(none) upper lower escaped true false filter
""".split()
OPERATORS = ["+", "*", "//", "%", "~", "==", "!=", "<", ">=", "in", "not in", "and", "or"]
FORMATS = ["%s", "%d", "%5.1f", "%r", "%x", "%-6s|", "%c", "%e", "%g", "%05d", "%+d", "%%"]


class Writer:
    def __init__(self, seed):
        self.dice = random.Random(seed)

    def one(self, *choices):
        return self.dice.choice(choices)

    def maybe(self, share, text):
        return text if self.dice.random() < share else ""

    def atom(self):
        return self.one(*ATOMS).replace("_", " ")

    def part(self, depth):
        """An expression that may occur inside another one."""
        return f"({self.expression(depth)})" if depth > 0 else f"({self.atom()})"

    def expression(self, depth):
        if depth <= 0:
            return self.atom()
        part = lambda: self.part(depth - 1)
        forms = [
            lambda: f"{part()} | {self.one(*FILTERS)}", lambda: f"{part()} | {self.one(*FILTERS)}", lambda: f"{part()}.{self.one(*METHODS)}",
            lambda: f"{part()} {self.one(*OPERATORS)} {part()}", lambda: f"{part()} is {self.maybe(.2, 'not ')}{self.one(*TESTS)}",
            lambda: f"{part()}[{self.one('0', '-1', '9', 'none', repr('a'), repr('role'))}]",
            # Jinja2 computes slices of constants by another rule.
            lambda: f"{self.one(*VARIABLES)}[{self.one('', '1', '-1', '5')}:{self.one('', '2', '-1', '0')}{self.one('', ':-1', ':2')}]",
            lambda: f"{part()} if {part()}{self.maybe(.8, ' else ' + part())}", lambda: f"not {part()}",
            lambda: f"[{part()}, {part()}]", lambda: f"({part()}, {part()})", lambda: f"{{{self.one('1', 'none', repr('k'))}: {part()}}}",
            lambda: f"{part()} < {part()} <= {part()}", lambda: f"{self.one(*FORMATS)!r} % {part()}",
        ]
        return self.one(*forms)()

    def tag(self, text):
        return f"{{%{self.one('', '', '', '', '-', '+')} {text} {self.one('', '', '', '-')}%}}"

    def body(self, depth):
        return "".join(self.piece(depth) for _ in range(self.dice.randint(1, 3)))

    def piece(self, depth):
        text = lambda: self.one("a", " ", "\n", "  \n", "\n  ", "x\n\n", "\t", "\r\n", "{# c #}", "{#- c -#}\n", "é", "  {# d #}\n")
        shown = lambda: f"{{{{{self.one('', '', '-')} {self.expression(self.dice.randint(0, 2))} {self.one('', '', '-')}}}}}"
        if depth <= 0:
            return self.one(text, shown)()
        tag, body, value = self.tag, lambda: self.body(depth - 1), lambda: self.expression(1)
        forms = [
            text, shown,
            lambda: tag(f"for {self.one('i', 'i', 'k, v')} in {value()}{self.maybe(.3, ' if ' + value())}")
            + self.one("{{ loop.index }}", "{{ i }}", "{{ loop.last }}{{ loop.previtem }}", "{{ k }}={{ v }}", "{{ loop.revindex0 }}") + body()
            + self.maybe(.3, tag("else") + "E") + tag("endfor"),
            lambda: tag(f"if {value()}") + body() + self.maybe(.2, tag(f"elif {value()}") + "e") + self.maybe(.4, tag("else") + body()) + tag("endif"),
            lambda: tag(f"set {self.one('m', 'i', 'q', 'ns.a', 'q, i')} = {value()}"),
            lambda: tag(f"set q{self.one('', ' | upper', ' | trim')}") + body() + tag("endset") + "{{ q }}",
            lambda: tag(f"macro f(i, q={self.atom()})") + body() + tag("endmacro") + f"{{{{ f({value()}) }}}}",
            lambda: tag(f"filter {self.one('upper', 'trim', 'indent(2)')}") + body() + tag("endfilter"),
            lambda: tag(f"with q = {value()}") + body() + tag("endwith"),
        ]
        return self.one(*forms)()


def generated(count):
    for seed in range(count):
        writer = Writer(seed)
        start = "{% set m = messages[0] %}{% set ns = namespace(a=0) %}"
        yield start + (writer.body(2) if seed % 2 else f"{{{{ {writer.expression(writer.dice.randint(1, 3))} }}}}"), CHAT
