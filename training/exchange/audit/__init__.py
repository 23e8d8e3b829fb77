"""The audit of owners: asks them and their backups what became of this node's deltas, and answers such questions.

`owner_audit` decides when and whom to ask, with the rules of `training.exchange.audit_records`, and `resending` repairs
what an owner has lost. `origins` asks nodes whether deltas that others offer are theirs. `verdicts` tells other members
who was left out. May import the context, the directory, the messages and `training.exchange.owner`.
"""
