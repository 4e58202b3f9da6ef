"""Checkpoints of several ranks: their files (`files`), what is in them (`record`), `saving`."""
