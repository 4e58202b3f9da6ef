"""Seeded schedules of losses, stops, cuts and joins, played against a training, and what held."""
