"""Where the time of a run went: what each rank records, by the callback `StepTrace`."""
