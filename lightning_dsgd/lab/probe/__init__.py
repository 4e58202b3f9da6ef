"""`lightning-dsgd probe`: what a message, a sum and a selection cost on this cluster."""
