"""Jobs of several ranks on this machine: their cells, processes and networks."""
