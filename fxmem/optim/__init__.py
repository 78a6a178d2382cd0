"""Optimizers whose state is low-rank."""

from fxmem.optim.adapprox import Adapprox
from fxmem.optim.adapt import adapt_optimizer

__all__ = ["Adapprox", "adapt_optimizer"]
