"""The line of a node: its measured rate, the capacity class that it announces, and its trial when it joins.

`capacity` and `rate` are pure; `overlay.sockets.line_meter` measures.
"""
