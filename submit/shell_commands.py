"""Read the commands of a shell script, with the variables that the script itself sets."""

import functools
import operator
import re
from contextlib import suppress

# What a shell replaces, what it quotes, and what separates commands outside of both. No text
# matches two alternatives, so that an open quote costs no time.
PARENTHESES = r"\([^()]*\)"
for _ in range(4):
    PARENTHESES = rf"\((?:\\[\s\S]|'[^']*'|\"(?:\\[\s\S]|[^\"\\])*\"|[^()'\"\\]|{PARENTHESES})*\)"
SUBSTITUTION = rf"\${PARENTHESES}|`[^`]*`"
EXPANSION = re.compile(rf"\\[\s\S]|{SUBSTITUTION}|\$\{{(\w+)(?:\[[@*]\]|:?-([^{{}}]*))?\}}|\$(\w+)")
QUOTED = rf"'[^']*'|\"(?:\\[\s\S]|{SUBSTITUTION}|[^\"\\$`]|\$(?!\())*\""
PIECE = re.compile(f"{EXPANSION.pattern}|{QUOTED}")
UNIT = rf"\\[\s\S]|{SUBSTITUTION}|\$\{{[^}}]*\}}|{QUOTED}|(?<==){PARENTHESES}"
SEPARATOR = re.compile(rf"{UNIT}|((?<!\S)#.*|[\n;|]|(?<!>)&(?!>))")
ASSIGNMENT = re.compile(rf"(?:(?:export|declare|local|readonly)\s+(?:-\w+\s+)*)?([A-Za-z_]\w*)"
                        rf"(\+?)=((?:{UNIT}|[^\s'\"])*)\s*")
CHANGE = re.compile(r"\bfor\s+(?:\(\(\s*)?(\w+)|\(\(\s*(\w+)\s*(?:\+\+|\+=)|"  # in a loop
                    r"\b(\w+)=\$\(\(\s*\$?\{?\3\b|\blet\s+\"?(\w+)")
LOOP = re.compile(r"for (?:\(\(\s*)?(\w+)\s*(?:=|in (?:\{|\$\(seq )?)\s*(\w*)")
KEYWORDS = re.compile(r"(?:\s|[({!](?=\s)|\((?!\()|(?:then|do|else|time|exec|nohup|env)\b)*")
COMPARISONS = {"-eq": "eq", "==": "eq", "=": "eq", "-ne": "ne", "!=": "ne", "-gt": "gt", ">": "gt",
               "-lt": "lt", "<": "lt", "-ge": "ge", "-le": "le"}


def read_commands(shell, variables):
    """Yield (line number, text, is in a loop) of each command, with known variables replaced.

    variables: {name: value, or None where it is not known}; the script's assignments are added,
    and for a variable that a loop changes {f"first {name}": its first value}.
    Text without quotes, so that `bash -c '...'` shows what it runs; $(...) is not run.
    """
    loop_variables = {name for names in CHANGE.findall(shell) for name in names if name}
    replace = functools.partial(PIECE.sub, functools.partial(expand, variables))
    start, loops, branches = 0, 0, []  # for each open `if`, see choose_branch()
    for separator in SEPARATOR.finditer(shell + "\n"):
        if not separator[1]:
            continue
        text = shell[start:separator.start()].strip()
        line, start = 1 + shell.count("\n", 0, start), separator.end()
        if text.startswith("if "):
            branches.append([])
        if re.match(r"(if|elif|else)\b", text) and branches:
            choose_branch(branches[-1], replace(text))
        elif re.match(r"fi\b", text) and branches:
            branches.pop()
        text = KEYWORDS.sub("", text, count=1)
        loops += bool(re.match("(for|while|until) ", text)) - text.startswith("done")
        if any(branch[-1] is False for branch in branches):
            continue
        if loop := LOOP.match(text):
            variables[loop[1]], variables[f"first {loop[1]}"] = None, loop[2]
        while match := ASSIGNMENT.match(text):
            assign(match[1], match[2], replace(match[3]), variables, loop_variables)
            text = text[match.end():]
        if text:
            yield line, replace(text), loops > 0


def assign(name, plus, value, variables, loop_variables):
    """Set a variable of the script; one that gets a second value is not known any more."""
    if value.startswith("("):
        value = value[1:-1]
    if plus:
        variables[name] = variables.get(name) and f"{variables[name]} {value}"
    elif name in loop_variables:
        variables[name] = None
        variables.setdefault(f"first {name}", value)
    else:
        variables[name] = value if variables.get(name, value) == value else None


def expand(variables, match):
    """Return what a shell puts in place of a match of EXPANSION or QUOTED."""
    piece = match[0]
    if piece[0] in "'\\":
        return " " if piece == "\\\n" else piece.strip("'\\")
    if piece[0] == '"':
        return expand_all(piece[1:-1], variables)
    if piece.startswith("$(("):
        return calculate(piece, variables)
    if piece[0] == "`" or piece[1] == "(":
        if "PBS_NODEFILE" in piece and re.search(r"\bwc -l\b", piece):
            name = "nodes" if re.search("uniq|sort -u", piece) else "slots"
            return variables.get(name) or "$(...)"
        return "$(tail)" if re.search(r"\btail\b", piece) else "$(...)"
    value = variables.get(match[1] or match[3])
    return value or (match[2] and expand_all(match[2], variables)) or piece


def expand_all(text, variables):
    return EXPANSION.sub(functools.partial(expand, variables), text)


def calculate(piece, variables):
    """Return the value of $((...)), or the piece itself where a variable is not known."""
    terms = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\}?", lambda name: variables.get(name[1]) or "?",
                   piece[3:-2])
    if re.fullmatch(r"(?:[\d\s+()/-]|\*(?!\*))+", terms):
        with suppress(ArithmeticError, SyntaxError, TypeError):
            return str(eval(terms.replace("/", "//")))
    return piece


def choose_branch(branch, text):
    """Append whether the script takes the branch that `if`, `elif` or `else` begins, or None."""
    match = re.match(r"(?:el)?if [\[(]+ *(\d+) *(-\w\w|[=!]?=|[<>]) *(\d+) *[\])]+$", text)
    holds = True if text.startswith("else") else None
    if match and match[2] in COMPARISONS:
        holds = getattr(operator, COMPARISONS[match[2]])(int(match[1]), int(match[3]))
    branch.append(False if True in branch else holds if None not in branch or not holds else None)
