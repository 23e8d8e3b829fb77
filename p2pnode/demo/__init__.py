"""`p2pnode demo`: several daemons on one machine that only together learn their task.

Starts and reads the daemons as a user would: through the command line and the HTTP API.
"""
