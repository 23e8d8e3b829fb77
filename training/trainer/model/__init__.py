"""The model as the trainer sees it: its vector, its other tensors, what it may not change, and what enters it."""
