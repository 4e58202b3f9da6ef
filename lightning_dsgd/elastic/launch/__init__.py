"""Starts the ranks of a node and looks after them: `lightning-dsgd launch`."""
