"""Synchronisation between learners: policies as pure state machines, and the drivers that need no network.

`settings` and `presets` say what a policy is, `syncer` and its parts decide, `participant` and `merger` carry the
decisions out on tensors, `virtual_clock` drives them in one process and `replay` does a run again from its event log.
"""
