"""Where the time of a run went: what each rank recorded, and how it is drawn."""
