"""Selective-save ops, one file per family, and the ordered table of their rules."""

from __future__ import annotations

from fxmem.ops import activation, batch_norm, conv, dropout, index, linear, pad, pool, relu
from fxmem.ops.common import Rule

RULES: tuple[Rule, ...] = (
    linear.RULE,
    conv.RULE,
    batch_norm.RULE,
    relu.RULE,
    *activation.RULES,
    *pool.RULES,
    dropout.RULE,
    pad.RULE,
    *index.RULES,
)
"""Every rule, in the order in which they are tried; no two speak of the same module class or function."""
