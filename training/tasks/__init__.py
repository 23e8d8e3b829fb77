"""What is trained: the protocol of a task (`training.tasks.task`) and the tasks that come with the program.

`digits`, `mnist` and `text` are names; anything else is "package.module:Class", a class of the user's own that has the
same methods. It runs in the trainer's process alone.
"""

from __future__ import annotations

#: Names a user may write for "package.module:Class".
BUILT_IN = {
    "digits": "training.tasks.digits:Digits",
    "mnist": "training.tasks.mnist:Mnist",
    "text": "training.tasks.text:Text",
}
