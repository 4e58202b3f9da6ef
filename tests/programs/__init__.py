"""Programs that nobody here wrote, with strategies of this package in ddp's place."""
