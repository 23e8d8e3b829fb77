"""The state of the shards that a node owns or backs up, their terms and fences. Pure. No I/O, no clock.

May import `training.exchange.terms`, `training.exchange.messages`, `training.shards` and `training.encoding`. The
protocol is docs/protocol.md; `state_stream` and `state_files` give states their form on the wire and on disk.
"""
