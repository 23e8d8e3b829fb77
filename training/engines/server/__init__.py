"""The parameter server: nodes with `role = "server"` own the values, and the first of them gives tasks to the others.

`tasks`, `gate`, `acceptance` and `core` decide (pure): which tasks are leased, who may begin its next step, which
updates count, and all of it together. `messages` is what passes between server and workers. `service` and `worker`
run them.
"""
