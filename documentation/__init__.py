"""The documentation site: what is generated from the code, and how pages outside docs/ enter it.

`make docs` writes the generated pages and builds the site. Nothing here is part of the installed package.
"""
