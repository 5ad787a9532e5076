"""A policy between learners as it is written on a command line: ``NAME[:key=value,...]``.

The keys are the entries of `sync.between`. They hold for all classes of parameters; those that begin with ``expert.``
or ``router.`` hold for these alone, ``outer.lr`` and the like go one level deeper, and ``optim.lr`` and the like give a
policy its own optimizer. ``recipe`` is what the recipe says.
"""

from __future__ import annotations

from moe_async.errors import SyncError


def policy_overrides(text: str, has_experts: bool) -> list[str]:
    """Recipe entries, as ``KEY=VALUE``, for a policy as it is written on the command line.

    Args:
        text: the policy.
        has_experts: whether the recipe's model has routers and experts.

    Raises:
        SyncError: an entry is not of the form key=value.
    """
    if text == "recipe":
        return []
    name, _, rest = text.partition(":")
    same = ", expert: {policy: same}, router: {policy: same}" if has_experts else ""
    overrides = [f"sync.between={{dense: {{policy: {name}}}{same}}}"]
    for entry in rest.split(",") if rest else []:
        key, equals, value = entry.partition("=")
        if not (key.strip() and equals and value.strip()):
            raise SyncError(f"{entry!r} in the policy {text!r} is not key=value. Write it like diloco:every=20,lr=0.7.")
        path = key.strip()
        if not path.startswith("optim."):
            path = f"sync.between.{path if path.startswith(('expert.', 'router.')) else f'dense.{path}'}"
        overrides.append(f"{path}={value.strip()}")
    return overrides
