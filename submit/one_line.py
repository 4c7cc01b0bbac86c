"""What a program says to its user's mistake: one line and exit code 2, without argparse's usage, which --help shows."""

import argparse


class Parser(argparse.ArgumentParser):
    """argparse's; its description is the first line of the program's text, and flags have one name."""

    def __init__(self, doc: str, **options: object):
        super().__init__(description=doc.splitlines()[0], allow_abbrev=False, **options)

    def error(self, message: str) -> None:
        self.exit(2, f"{self.prog}: {message}\n")


def whole(text: str) -> int:
    """The type of a flag that takes a whole number above 0."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)
