"""Sharded exchange: each shard has one owner and one backup; all nodes push to and pull from the owners.

`store` holds the state of the shards and decides by roles, terms and identities (pure). `owner` serves pushes and
pulls, and forwards deltas to backups; `client` pushes and pulls. `recovery` moves shards, takes over those without an
owner, and reconciles the two sides of a split. `exchange` composes the services.

Imports run one way: terms, messages, timeouts and peer_score, store, run_state and rpc, published, delta, directory,
owner and client, recovery, exchange. The protocol is described in `docs/protocol.md`, its reasons in
`docs/architecture.md`. A comment that begins with "Promise 3" names row 3 of the table in `docs/faults.md`.
"""
