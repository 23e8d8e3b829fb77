"""Records for `swarm.records` and task classes: tasks of the master or of this node, drawn and counted."""
