"""Wrong solutions of exercise 9: {name: (changes to the solution, what the hint says)}."""

WRONG = {
    "nothing typed in": ([('"a": "sum"', '"a": None')], "write one of these in quotes: weights"),
    "a name that is none": ([('"a": "sum"', '"a": "summed"')], "write one of these in quotes: weights"),
    "a: twice": ([('"a": "sum"', '"a": "twice"')], "1 on the one rank and 3 on the other"),
    "b: weights": ([('"b": "own gradients"', '"b": "weights"')], "look where forward and backward are called"),
    "c: same data": ([('"c": "order"', '"c": "same data"')], "in the second epoch"),
    "d: overlap": ([('"d": "same data"', '"d": "overlap"')], "Which images does rank 1 have in its first batch"),
    "d: order": ([('"d": "same data"', '"d": "order"')], "each epoch has the same order"),
    "e: own gradients": ([('"e": "weights"', '"e": "own gradients"')], "before the first one"),
    "f: own gradients": ([('"f": "part"', '"f": "own gradients"')], "look at parameters one by one"),
    "a script left out": ([('    "f": "part",', "")], 'the keys "a" to "f"'),
    "no answers": ([("ANSWERS =", "NAMES =")], 'the keys "a" to "f"'),
}
