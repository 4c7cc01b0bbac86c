"""Examine a cluster, predict and measure how training scales there; see README.md.

The chapters' programs do not import this package. It starts them as an attendee does.
"""
