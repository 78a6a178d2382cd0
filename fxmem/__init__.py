"""Train PyTorch models in less memory: a torch.fx compiler pass that keeps only what backward needs."""

import warnings
from pathlib import Path

with warnings.catch_warnings():
    # Where there is no NumPy, which nothing here needs, this module of torch's warns as it is imported.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    import torch._subclasses.functional_tensor  # noqa: F401

# In a checkout the passes lie beside the package; whoever runs Python there gets this folder, installed or not.
_here = Path(__file__).parent
if not (_here / "passes").is_dir() and (_here.parent / "passes" / "__init__.py").is_file():
    __path__.append(str(_here.parent))

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
