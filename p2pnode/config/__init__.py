"""Settings: where they come from (file, environment, flags), what they may be, and their documentation.

May import the settings structs of `overlay` and `training`, nothing else of them: the command line starts fast.
"""
