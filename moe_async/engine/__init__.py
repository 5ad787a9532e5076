"""Training: the bridge to DeepSpeed, the step, evaluation, checkpoints and the loop with its hooks.

`moe_async.engine.deepspeed_bridge` is the only module that imports deepspeed, and it is imported only when training
starts.
"""
