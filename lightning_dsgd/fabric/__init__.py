"""The face for Lightning's Fabric."""
