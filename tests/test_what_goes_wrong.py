"""WHAT_GOES_WRONG.md has every message that our programs print where something fails, and none that none prints.

What a program says is read from its syntax tree, a shell script's from its lines. A new message wants a row in a table
of the page whose first column is called "the message"; there its constant words stand as code, with capitals (N, FILE)
or dots for what changes. A message of somebody else's program stands in a table of which the last column is "known
from".
"""

import ast
import re

from conftest import ROOT

from tools.pages import docs

PAGE = ROOT / "WHAT_GOES_WRONG.md"
PROGRAMS = ("[0-9][0-9]_*/**/*.py", "reading_data/*.py", "submit/*.py", "exercises/*.py", "exercises/*/check.py",
            "tools/**/*.py")
SCRIPTS = "Makefile", "submit/*.sh", "submit/sites/*.sh", "**/submit.*", "submit/*.pbs", "submit/*.slurm"
SAYING = {"exit", "SystemExit", "fail", "error", "end_by_mistake",  # what is called with a message; or with its cure,
          "refuse_contradiction", "run", "begin"}  # or with what is to be said if it takes too long
SET_UP = {"print", "step"}  # in tools/environment these say other things, too: what goes wrong shows by these words
TROUBLE = re.compile(r"\b(not|no|left out|waits for)\b")
GAP = "\0"  # what is known when the program runs


def called(node):
    """The name of what is called."""
    return getattr(node.func, "id", None) or getattr(node.func, "attr", "")


class Program:
    """The messages of one Python file. `programs`: all of them, by their names without .py."""

    def __init__(self, path, programs):
        self.path, self.tree, self.programs = path, ast.parse(path.read_text()), programs
        self.assigned, self.returned, self.modules = {}, {}, {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Assign | ast.NamedExpr):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                self.assigned.setdefault(getattr(target, "id", ""), []).append(node.value)
            elif isinstance(node, ast.FunctionDef) and node.name != "main":
                self.returned[node.name] = [part.value for part in ast.walk(node)
                                            if isinstance(part, ast.Return) and part.value]
            elif isinstance(node, ast.Import | ast.ImportFrom):
                module = getattr(node, "module", None)
                self.modules |= {alias.asname or alias.name: module or alias.name for alias in node.names}

    def messages(self):
        """The texts that it may say, with GAP in them, each with its line."""
        for node in ast.walk(self.tree):
            said = []
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                said = node.exc.args
            elif isinstance(node, ast.Call) and (called(node) in SAYING or any(
                    "stderr" in ast.unparse(word.value) for word in node.keywords if word.arg == "file")):
                said = node.args[called(node) == "begin":]  # behind a key
            elif isinstance(node, ast.Call) and called(node) in SET_UP and self.path.parent.name == "environment":
                said = [arg for arg in node.args[:1] if TROUBLE.search(self.texts(arg)[0])]
            elif isinstance(node, ast.Dict):
                said = [value for key, value in zip(node.keys, node.values)
                        if isinstance(key, ast.Constant) and key.value in ("failed", "left_out")]
            for expression in said:
                yield from ((node.lineno, text) for text in self.texts(expression))

    def texts(self, node, seen=frozenset()):
        """What an expression may be as text: the first for itself, others for what is put into it."""
        if isinstance(node, ast.Constant):
            return [node.value] if isinstance(node.value, str) else [GAP]
        if isinstance(node, ast.JoinedStr):
            inside = [text for part in node.values if isinstance(part, ast.FormattedValue)
                      for text in self.texts(part.value, seen)]
            return ["".join(getattr(part, "value", GAP) if isinstance(part, ast.Constant) else GAP
                            for part in node.values), *inside]
        if isinstance(node, ast.BinOp):
            (left, *more), (right, *others) = self.texts(node.left, seen), self.texts(node.right, seen)
            return [left if isinstance(node.op, ast.Mult) else left + right, *more, *others]
        if isinstance(node, ast.IfExp | ast.BoolOp):
            parts = [node.body, node.orelse] if isinstance(node, ast.IfExp) else node.values
            return [GAP, *(text for part in parts for text in self.texts(part, seen))]
        if isinstance(node, ast.Name | ast.Attribute):
            return [GAP, *self.followed("assigned", node, seen)]
        if isinstance(node, ast.Call):
            own = self.texts(node.func.value, seen) if isinstance(node.func, ast.Attribute) else [GAP]
            own = [re.sub(r"\{[^{}]*\}", GAP, text) for text in own] if called(node).startswith("format") else own
            return [*own, *self.followed("returned", node.func, seen)]
        return [GAP]

    def followed(self, kind, node, seen):
        """The texts of what a name stands for, or of what a function returns, here or in the file it comes from."""
        name = getattr(node, "id", None) or node.attr
        place = self.modules.get(getattr(getattr(node, "value", node), "id", ""))
        program = self.programs.get(place.split(".")[-1]) if place else self if isinstance(node, ast.Name) else None
        if not program or name in seen:
            return []
        return [text for value in getattr(program, kind).get(name, []) for text in program.texts(value, seen | {name})]


def python_programs():
    """{path: Program} of all Python files that may say something, of copies one."""
    copies, programs = {copy for _, copy in docs.copies()}, {}
    paths = [path for pattern in PROGRAMS for path in sorted(ROOT.glob(pattern)) if path not in copies]
    found = {path: Program(path, programs) for path in paths}
    programs |= {path.stem: program for path, program in found.items()}
    return found


def shell_messages():
    """The same of scripts: what is echoed to standard error, given to fail, or said where a variable is not set."""
    patterns = r'\bfail "((?:[^"\\]|\\.)*)"', r'echo "([^"]*)"(?: >&2|; exit)', r"\$\{\w+:\?([^}]+)\}"
    for path in sorted({path for pattern in SCRIPTS for path in ROOT.glob(pattern)}):
        text = path.read_text().replace("\\\n", "")
        for number, line in enumerate(text.splitlines(), 1):
            for found in (match[1] for pattern in patterns for match in re.finditer(pattern, line)):
                yield path, number, re.sub(r"\$\{[^}]*\}|\$\([^)]*\)|\$[\w#?*@]+", GAP, found)


def squeezed(text):
    return " ".join(text.replace("`", "").replace("\\|", "|").split())


def words(text):
    return len(re.findall(r"[A-Za-z][\w'.-]*", text))


def pieces(text, gap=GAP):
    """The parts of a text between its gaps by which it can be told: those of three words or more, else the longest."""
    parts = [squeezed(part).strip("\"' ,:;") for part in re.split(gap, text)]
    return [part for part in parts if words(part) >= 3] or [part for part in parts if words(part) == 2][:1]


def rows():
    """(its table's head, the cells) of each row of the page."""
    head = None
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        head = (head or cells) if cells else None
        if cells and cells is not head and not set(cells[0]) <= set("-: "):
            yield head, cells


def quotes():
    """What the page quotes of our own programs."""
    return [squeezed(quote) for head, cells in rows() if head[0] == "the message"
            for quote in re.findall(r"`([^`]+)`", cells[0])]


PYTHON = python_programs()
MESSAGES = [*((path, *message) for path, program in PYTHON.items() for message in program.messages()),
            *shell_messages()]


def lacking(said):
    """For each message of which words are not on the page a line: where it is, what is missing, and all of it."""
    quoted = quotes()
    return sorted({f"{path.relative_to(ROOT)}:{line}: no row of {PAGE.name} has `{piece}`, of: "
                   + squeezed(text.replace(GAP, "..."))
                   for path, line, text in said for piece in pieces(text)
                   if not any(piece in quote for quote in quoted)})


def test_every_message_of_our_programs_is_on_the_page():
    found = lacking(MESSAGES)
    assert not found, "\n".join(["", *found])


def test_a_message_without_a_row_is_noticed_and_named():
    path = PAGE.with_name("new.py")
    assert lacking([(path, 7, f"--speed {GAP}: no rank runs so fast"), (path, 8, f"cannot write {GAP}: {GAP}")]) == [
        "new.py:7: no row of WHAT_GOES_WRONG.md has `no rank runs so fast`, of: --speed ...: no rank runs so fast"]


def test_what_the_page_quotes_is_said_by_a_program():
    """Also what programs say in passing: any text of theirs."""
    said = [squeezed(text) for _, _, text in MESSAGES]
    said += [squeezed(part.value) for program in PYTHON.values() for part in ast.walk(program.tree)
             if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    changing = r"\b[A-Z][A-Z_]*\b|\.\.\."
    gone = [quote for quote in quotes() if not all(any(piece in text for text in said)
                                                   for piece in pieces(quote, changing))]
    assert not gone, "no program says this any more"


def test_what_others_programs_say_has_its_source():
    found = [cells for head, cells in rows() if head[-1] == "known from"]
    assert len(found) > 20 and all(re.search(r"\btried\b|\]\(|#\d", cells[-1]) for cells in found)
