"""What is simulated: the plan, step times, random streams, samplers, outcomes, metrics and analytical bounds. Pure."""
