"""Wrong solutions of exercise 9: {name: (changes to the solution, what the hint says)}."""

WRONG = {
    "a: twice": ([('"a": "sum"', '"a": "twice"')], "1 on one rank and 3 on the other"),
    "c: weights": ([('"c": "part"', '"c": "weights"')],
        "compare the parameters one by one after a step"),
}
