"""Functions that build what tests begin with: contacts, stores, record files, updates, plans of simulations.

Nothing here runs a loop.
"""
