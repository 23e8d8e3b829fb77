"""The audit of owners: whether what they acknowledge reaches their backups, and what they publish is what those have.

What is remembered, what is asked, and who is to blame. `training.exchange.owner_audit`, `audit_answers` and `resending`
send and serve the requests. May import the messages and terms of the exchange.
"""
