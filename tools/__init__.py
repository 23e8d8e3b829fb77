"""Programs for those who work on this repository. They import nothing of its packages."""
