"""What the audit of owners goes by: acknowledged deltas, published values, and outcomes that show who is to blame, or
who forges repairs.

`training.exchange.audit` asks and answers. May import the messages and terms of the exchange.
"""
