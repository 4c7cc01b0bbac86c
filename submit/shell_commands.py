"""Read the commands of a shell script, with the variables that the script itself sets."""

import re
from contextlib import suppress

# What a shell replaces, what it quotes, and what separates commands outside of both
SUBSTITUTION = r"\$\(\((?:[^()]|\([^()]*\))*\)\)|\$\((?:[^()]|\([^()]*\))*\)|`[^`]*`"
EXPANSION = re.compile(rf"\\[\s\S]|{SUBSTITUTION}|\$\{{(\w+)(?:\[[@*]\]|:?-([^{{}}]*))?\}}|\$(\w+)")
QUOTED = rf"'[^']*'|\"(?:\\[\s\S]|{SUBSTITUTION}|[^\"\\])*\""
PIECE = re.compile(f"{EXPANSION.pattern}|{QUOTED}")
ARRAY = r"(?<==)\((?:[^()]|\([^()]*\))*\)"
UNIT = rf"\\[\s\S]|{SUBSTITUTION}|\$\{{[^}}]*\}}|{QUOTED}|{ARRAY}"
SEPARATOR = re.compile(rf"{UNIT}|((?<!\S)#.*|[\n;|]|(?<!>)&(?!>))")
ASSIGNMENT = re.compile(rf"(?:(?:export|declare|local|readonly)\s+(?:-\w+\s+)*)?([A-Za-z_]\w*)"
                        rf"(\+?)=((?:{UNIT}|[^\s'\"])*)\s*")
KEYWORDS = re.compile(r"(?:\s|[({!](?=\s)|\((?!\()|(?:then|do|else|time|exec|nohup|env)\b)*")


def read_commands(shell, variables):
    """Yield (line number, text, is in a loop) of each command, with known variables replaced.

    variables: {name: value, or None where it is not known}; the script's assignments are added.
    Text without quotes, so that `bash -c '...'` shows what it runs; $(...) is not run.
    """
    def expand(match):
        piece = match[0]
        if piece[0] in "'\\":
            return " " if piece == "\\\n" else piece.strip("'\\")
        if piece[0] == '"':
            return EXPANSION.sub(expand, piece[1:-1])
        if piece.startswith("$(("):
            return calculate(piece, variables)
        if piece[0] == "`" or piece[1] == "(":
            return "$(...)"
        value = variables.get(match[1] or match[3])
        return value or (match[2] and EXPANSION.sub(expand, match[2])) or piece

    start = loops = 0
    for separator in SEPARATOR.finditer(shell + "\n"):
        if not separator[1]:
            continue
        text = KEYWORDS.sub("", shell[start:separator.start()], count=1)
        if loop := re.match(r"for (\w+)", text):
            variables[loop[1]] = None
        loops += bool(re.match("(for|while|until) ", text)) - text.startswith("done")
        while match := ASSIGNMENT.match(text):
            name, value = match[1], PIECE.sub(expand, match[3])
            if match[3].startswith("("):
                value = value[1:-1]
            if match[2]:
                variables[name] = variables.get(name) and f"{variables[name]} {value}"
            else:
                variables[name] = value if variables.get(name, value) == value else None
            text = text[match.end():]
        if text:
            yield 1 + shell.count("\n", 0, start), PIECE.sub(expand, text), loops > 0
        start = separator.end()


def calculate(piece, variables):
    """Return the value of $((...)), or the piece itself where a variable is not known."""
    terms = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\}?", lambda name: variables.get(name[1]) or "?",
                   piece[3:-2])
    if re.fullmatch(r"(?:[\d\s+()/-]|\*(?!\*))+", terms):
        with suppress(ArithmeticError, SyntaxError, TypeError):
            return str(eval(terms.replace("/", "//")))
    return piece
