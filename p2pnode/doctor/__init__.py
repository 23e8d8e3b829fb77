"""`p2pnode doctor`: looks for what keeps a node from working, each finding with what to do.

`check` is a finding, `machine` judges this machine, `running` what a node says of itself; these three are pure.
`gather` reads the facts of this machine and its state directory. `visit` joins the swarm for a moment and measures
lines there (`line_speed`). `examine` does all of it in order. It may import the modules of the daemon; nothing but the
commands imports it.
"""
