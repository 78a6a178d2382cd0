"""Train PyTorch models in less memory: a torch.fx compiler pass that keeps only what backward needs."""

from fxmem.api import optimize, report
from fxmem.errors import ArgumentError, CaptureError, FxmemError, OptimizerError, RewriteError
from fxmem.measure import measure
from fxmem.optim import Adapprox, adapt_optimizer
from fxmem.pipeline import OptimizedModule
from fxmem.records import Decision, Measurement, MemoryReport

__version__ = "0.1.0"

__all__ = [
    "Adapprox",
    "ArgumentError",
    "CaptureError",
    "Decision",
    "FxmemError",
    "Measurement",
    "MemoryReport",
    "OptimizedModule",
    "OptimizerError",
    "RewriteError",
    "adapt_optimizer",
    "measure",
    "optimize",
    "report",
]
