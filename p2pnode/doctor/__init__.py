"""`p2pnode doctor`: looks for what keeps a node from working, each finding with what to do.

`machine` has the type of a finding, and looks at this machine and its state directory. `visit` joins the swarm for a
moment. `examine` does all of it in order. It may import the modules of the daemon; nothing but the commands imports it.
"""
