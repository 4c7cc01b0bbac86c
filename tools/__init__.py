"""What `make` runs: environment, measurements, pages. By hand: python -m tools.measuring.demo.

Arrows go one way: tools use submit/, never the other way.
"""
