"""Aggregation for large swarms: deltas travel in bundles over a few other nodes to the owners of their shards.

`routes` decides who hands on what (pure), `bundles` are the messages (pure), `relays` sends, hands on and delivers.
A delta keeps its identity, its weight and its bytes all the way, and its origin keeps it until its owner has answered.
"""
