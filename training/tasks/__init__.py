"""Tasks: the protocol of a task (`training.tasks.task`), and the built-in tasks `digits`, `mnist` and `text`.

Any other task is a class of the user's own, named "package.module:Class", with the same methods. Tasks run only in the
trainer process.
"""

from __future__ import annotations

#: Names of the built-in tasks.
BUILT_IN = {
    "digits": "p2pnode.training.tasks.digits:Digits",
    "mnist": "p2pnode.training.tasks.mnist:Mnist",
    "text": "p2pnode.training.tasks.text:Text",
}
