"""Many nodes in one process on the simulated network: whole daemons, overlays alone, exchanges alone, engines.

A module here starts the nodes, stops them, and reads what they have. What befalls them at random is in `histories`.
"""
