"""One rank's copy of the model: flat parameters, and all that must agree with other ranks."""
