"""Tells whether the ranks of a PyTorch script train one model: see README.md."""
