"""Programs for those who work on this repository: its size, generated pages, the site, installation, audit of pins.

Nothing here is part of the installed package.
"""
