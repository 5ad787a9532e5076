"""Pure maths on tensors: routing, balance losses, permutation of tokens, expert networks, load statistics.

Nothing here holds parameters, knows ranks or communicates. Whoever owns a group does the sum.
"""
