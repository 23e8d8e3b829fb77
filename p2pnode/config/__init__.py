"""The settings: their sources (file, environment, flags), their checks and their documentation.

May import the settings structs of `overlay` and `training`, nothing else of them: the command line starts fast.
"""
