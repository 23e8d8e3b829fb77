"""Formats what the terminal shows: the JSON of the HTTP API as lines of a given width, in colour where it is wanted.

Sends no request, prints nothing and reads no clock: `p2pnode.screen` finds out what the terminal can do.
`numbers` and `lines` are below the views: `status_view`, `peers_view`, `watch_view`.

Pure.
"""
