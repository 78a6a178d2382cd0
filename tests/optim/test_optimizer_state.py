"""The companion pass on modules and graphs."""

import pytest
import torch
from torch import fx, nn

from fxmem.errors import OptimizerError
from fxmem.optim import Adapprox

passes = pytest.importorskip("fxmem.passes.optimizer_state", reason="passes/ is imported from an installed fxmem")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(32, 24), nn.Linear(24, 24)
        self.scale = nn.Parameter(torch.ones(24, 24))

    def forward(self, x):
        return self.used(x) @ self.scale


def test_graph_counts_only_what_it_uses():
    model = Net()
    model.used.bias.requires_grad_(False)
    graph = fx.symbolic_trace(model)
    report, opt = passes.optimizer_state(graph)
    assert opt is None
    assert sorted(row.name for row in report.rows) == ["scale", "used.weight"]


def test_converts_adamw_and_reports_its_bytes():
    model = Net()
    adamw = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 32)).sum().backward()
    adamw.step()
    report, opt = passes.optimizer_state(model, adamw)
    assert isinstance(opt, Adapprox)
    held = sum(t.numel() * t.element_size() for s in opt.state.values() for t in s.values())
    assert report.now == held < sum(t.numel() * t.element_size() for s in adamw.state.values() for t in s.values())
    assert passes.optimizer_state(model, opt)[1] is opt


def test_a_foreign_optimizer_is_refused():
    with pytest.raises(OptimizerError, match="none of the module's"):
        passes.optimizer_state(Net(), torch.optim.AdamW(nn.Linear(2, 2).parameters()))
