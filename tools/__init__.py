"""What `make` runs: environment, measurements, pages. In the top folder: python -m tools.measuring.demo.

Arrows go one way: tools use submit/, never the other way.
"""
