"""What algorithms are built from: collectives that wait for nobody, sparse sums, topologies."""
