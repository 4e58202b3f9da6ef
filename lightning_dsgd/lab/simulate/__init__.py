"""Algorithms on machines that one does not have: the world that `why` asks."""
