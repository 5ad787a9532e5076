"""What a recipe will need before it runs: parameters, memory, traffic, operations, time. Needs no torch."""
