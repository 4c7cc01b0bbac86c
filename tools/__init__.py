"""Programs of `make`: set-up, measurements, pages. By hand: python -m tools.measuring.demo.

Dependencies go one way: tools may import cluster and the chapters' programs, never the reverse.
"""
