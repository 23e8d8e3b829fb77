"""One part of a node with everything around it replaced: answers come from the test, and calls are recorded.

Also a stand-in for etcd. Swarms of real nodes are in `swarms`, stand-ins for trainers in `trainers`.
"""
