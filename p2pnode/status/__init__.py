"""The HTTP API of a node: status, peers, steps, events, metrics, and their OpenAPI description.

May import everything but `p2pnode.commands` and `p2pnode.demo`. `server` is imported late, in a thread, at start.
"""

from __future__ import annotations

from typing import Final

#: The schema number of every answer.
SCHEMA: Final = 1
#: Most entries one request for steps or events gets.
MAX_LIMIT = 2000
#: The header that a request for a change must carry: a form or an image on another site's page cannot send it.
CHANGE_HEADER = "X-P2PNode"
#: The header of every answer: its schema number.
SCHEMA_HEADER = "X-P2PNode-Schema"
