"""Wrong solutions of exercise 9: {name: (changes to the solution, what the hint says)}."""

WRONG = {
    "a: twice": ([('"a": "sum"', '"a": "twice"')], "1 on the one rank and 3 on the other"),
    "d: weights": ([('"d": "part"', '"d": "weights"')], "parameters one by one after a step"),
}
