"""Train PyTorch models in less memory: a torch.fx compiler pass that keeps only what backward needs."""

from fxmem.api import optimize, report
from fxmem.errors import ArgumentError, CaptureError, FxmemError, OptimizerError, RewriteError
from fxmem.measure import measure
from fxmem.pipeline import OptimizedModule
from fxmem.records import Decision, Measurement, MemoryReport

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "CaptureError",
    "Decision",
    "FxmemError",
    "Measurement",
    "MemoryReport",
    "OptimizedModule",
    "OptimizerError",
    "RewriteError",
    "measure",
    "optimize",
    "report",
]
