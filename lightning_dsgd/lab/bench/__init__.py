"""Measurements of the strategies: in real processes, and in the simulated world."""
