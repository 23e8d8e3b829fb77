"""Turns files into records: text, JSON lines, CSV, and the arrays of IDX and NPZ files.

`sources` finds and opens files and tells their format; `lines`, `tables` and `arrays` convert a family of formats each;
`formats` puts them together. Memory is bounded by one record or a block of rows, whatever the size of a file.
"""
