"""`lightning-dsgd simulate`: throughput on machines that one does not have."""
