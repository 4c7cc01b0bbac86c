"""Examine a cluster, predict and measure how training scales there; see README.md.

The chapters do not import this package. It starts their programs as an attendee does.
"""
