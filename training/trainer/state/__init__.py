"""The trainer's own state in files: what is saved, by which rank, and how it is written and read."""
