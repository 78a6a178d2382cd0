"""Models without a whole graph: what is rewritten region by region, and that the result is still the model."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import pickle
from dataclasses import dataclass
from typing import Any

import cases
import pytest
import torch
import torch.nn.functional as F
from oracle import compare, compare_runs
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxmem
from fxmem.measure import run


class Block(nn.Module):
    """Traceable, with functions of its own that rules speak of, and state that its code reads."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.Conv1d(width, width, 1)
        self.inner = nn.Sequential(nn.Conv1d(width, width, 1), nn.ReLU())
        self.out = nn.Conv1d(width, width, 1)
        self.scales = [1.0]
        self.skip = False

    def forward(self, x: Tensor, *rest: Any, gain: float = 1.0, shift: Tensor | None = None, **options: Any) -> Tensor:
        x = F.dropout(F.hardtanh(self.norm(x)), 0.5, training=self.training)
        if self.skip or options.get("skip"):
            return x * 2
        x = self.out(self.inner(x)) * (gain * self.scales[0])
        return x if shift is None else x + shift


class Branching(nn.Module):
    """No graph of the whole: it asks the data, and returns a dict."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(8, 2)
        self.threshold = 0.0

    def forward(self, x: Tensor, gain: float = 1.0, **options: Any) -> dict[str, Tensor]:
        for block in self.blocks:
            x = block(x, gain=gain, **options)
        pooled = x.mean(-1)
        if pooled.sum() > self.threshold:
            pooled = pooled * 2
        return {"logits": self.head(pooled), "pooled": pooled}

    def predict(self, x: Tensor) -> Tensor:
        return self(x)["logits"].argmax(-1)


def frozen(model: nn.Module) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("head" in name)
    return model


X = cases.randn(4, 8, 16)


@pytest.fixture
def pair() -> tuple[Branching, Any]:
    model = Branching()
    frozen(model)
    return model, fxmem.optimize(model, (X,))


def test_it_is_still_the_model(pair: tuple[Branching, Any]) -> None:
    model, optimized = pair
    assert type(optimized) is Branching
    assert list(optimized.state_dict()) == list(model.state_dict())
    assert all(a is b for a, b in zip(model.parameters(), optimized.parameters(), strict=True))
    assert torch.equal(optimized.eval().predict(X), model.eval().predict(X))
    assert inspect.signature(optimized.forward) == inspect.signature(model.forward)
    assert inspect.signature(optimized.blocks[0].forward) == inspect.signature(model.blocks[0].forward)
    assert isinstance(optimized.blocks[0], Block)
    assert not any(vars(m).keys() & {"decisions", "notes"} or "forward" in vars(m) for m in model.modules())


def test_what_is_kept_and_said(pair: tuple[Branching, Any]) -> None:
    model, optimized = pair
    eager, ours = compare(model, optimized, (X,))
    elements = X.numel()
    # Per block masks of hardtanh, dropout and ReLU, and the number that it multiplies by. The mean, doubled, is an output.
    assert ours.measurement.kept == 2 * (3 * elements // 8 + 8)
    assert eager.measurement.kept > 20 * ours.measurement.kept
    # A real run, which this model needs, does not show the numbers.
    assert [s.kept + 16 for s in optimized.saved] == [eager.measurement.kept, ours.measurement.kept]
    rewritten = {(d.module, d.op) for d in optimized.decisions if d.rewritten}
    assert {
        ("blocks.0", "hardtanh"),
        ("blocks.1", "dropout"),
        ("blocks.0.inner.1", "relu"),
        ("blocks.1.out", "conv"),
    } <= rewritten
    notes = "\n".join(optimized.notes)
    assert "captured by regions" in notes
    assert f"{__file__}:" in notes
    assert "blocks.0 (Block, and 1 more of them): a region that runs as a graph" in notes
    assert "head (Linear): a layer by itself" in notes


def test_structure_alone(pair: tuple[Branching, Any]) -> None:
    model, _ = pair
    optimized = fxmem.optimize(model)
    eager, ours = compare(model, optimized, (X,))
    assert ours.measurement.kept < eager.measurement.kept / 3
    assert optimized.saved is None


@pytest.mark.parametrize("start", ["train", "eval"])
def test_flags_afterwards(start: str) -> None:
    model = frozen(Branching()).train(start == "train")
    optimized = fxmem.optimize(model, (X,))
    for mode in (True, False, True):
        model.train(mode)
        optimized.train(mode)
        compare(model, optimized, (X,))
    model.blocks[0].train(False)
    optimized.blocks[0].train(False)
    compare(model, optimized, (X,))


def test_state_that_the_code_reads(pair: tuple[Branching, Any]) -> None:
    model, optimized = pair
    model.threshold = optimized.threshold = -1e9
    other, another = nn.Conv1d(8, 8, 1), nn.Conv1d(8, 8, 1)
    for change in (
        lambda m: m.blocks[0].scales.__setitem__(0, 3.0),
        lambda m: setattr(m.blocks[1], "skip", True),
        lambda m: setattr(m, "threshold", 1e9),
        lambda m: setattr(m.blocks[0], "out", copy.deepcopy(other)),
        lambda m: setattr(m.blocks[0].inner, "0", copy.deepcopy(another)),
        lambda m: m.blocks[0].inner.register_forward_hook(lambda m, i, o: o * 2),
        lambda m: m.blocks[1].register_forward_hook(lambda m, i, o: o * 3),
    ):
        before = run(model, (X,)).outputs
        change(model)
        change(optimized)
        compare_runs(run(model, (X,)), run(optimized, (X,)))
        assert not torch.equal(before["logits"], run(model, (X,)).outputs["logits"])


def test_other_arguments(pair: tuple[Branching, Any]) -> None:
    model, optimized = pair
    doubled = 8  # the number that it multiplies by
    model.threshold = optimized.threshold = -1e9
    compare(model, optimized, (X,), {"gain": 2.0})
    compare(model, optimized, (X,), {"skip": True})
    compare(model, optimized, (X,), {"shift": torch.ones(16)})
    given = fxmem.optimize(model, (X,), {"shift": torch.ones(16), "gain": 0.5})
    _, ours = compare(model, given, (X,), {"shift": torch.ones(16), "gain": 0.5})
    assert ours.measurement.kept == 2 * (3 * X.numel() // 8 + 8) + doubled
    compare(model, given, (X, 0.5), {"shift": torch.zeros(16)})
    for m in (model, optimized):
        with pytest.raises(TypeError, match="unexpected"):
            m.head(X, what=1)


def test_freezing_afterwards(pair: tuple[Branching, Any]) -> None:
    model, optimized = pair
    for parameters in (model.parameters(), model.blocks[0].parameters(), [model.head.weight]):
        model.requires_grad_(False)
        for parameter in parameters:
            parameter.requires_grad_()
        compare_runs(run(model, (X,)), run(optimized, (X,)))


def test_copies(pair: tuple[Branching, Any]) -> None:
    model, optimized = pair
    _, ours = compare(model, optimized, (X,))
    buffer = io.BytesIO()
    torch.save(optimized, buffer)
    buffer.seek(0)
    for twin in (
        copy.deepcopy(optimized),
        pickle.loads(pickle.dumps(optimized)),
        torch.load(buffer, weights_only=False),
    ):
        assert type(twin) is Branching
        assert not {id(p) for p in twin.parameters()} & {id(p) for p in optimized.parameters()}
        _, theirs = compare(optimized, twin, (X,))
        assert theirs.measurement.kept == ours.measurement.kept
        with torch.no_grad():
            twin.blocks[0].inner[0].weight.zero_()
        assert not torch.equal(twin.eval()(X)["logits"], optimized.eval()(X)["logits"])
        optimized.train()


def test_again(pair: tuple[Branching, Any]) -> None:
    model, optimized = pair
    optimized.requires_grad_(True)
    optimized.blocks[0].scales = [2.0]
    optimized.head = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    again = fxmem.optimize(optimized, (X,))
    assert type(again) is Branching
    model.blocks[0].scales = [2.0]
    model.head = optimized.head
    compare(model, again, (X,))
    report = fxmem.report(optimized, (X.detach(),), measured=True)
    assert report.measured is not None
    assert report.eager.kept == report.measured[0].kept


def test_planning_leaves_no_trace() -> None:
    model = nn.Sequential(nn.Conv1d(8, 8, 1), nn.BatchNorm1d(8), nn.Dropout(0.5), Branching())
    x = cases.randn(4, 8, 16)
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    state, before = torch.get_rng_state(), {id(m): dict(vars(m)) for m in model.modules()}
    apply = vars(torch.autograd.Function)["apply"]
    optimized: Any = fxmem.optimize(model, (x,))
    assert vars(torch.autograd.Function)["apply"] is apply
    assert any("run for real" in note for note in optimized.notes)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(b, buffers[name]) for name, b in model.named_buffers())
    assert x.grad is None
    assert all(p.grad is None for p in model.parameters())
    assert {id(m): dict(vars(m)) for m in model.modules()} == before
    assert "__getattribute__" not in vars(nn.Module)
    compare(model, optimized, (x,))


def test_hooks_registered_later_are_each_ones_own(pair: tuple[Branching, Any]) -> None:
    model, optimized = pair
    seen: list[str] = []
    model.head.register_forward_hook(lambda m, i, o: seen.append("model"))
    optimized.head.register_forward_hook(lambda m, i, o: seen.append("optimized"))
    model(X)
    optimized(X)
    assert seen == ["model", "optimized"]


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


class Reversing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Sequential(nn.Conv1d(8, 8, 1), nn.ReLU())
        self.back = nn.Sequential(nn.Conv1d(8, 8, 1), nn.ReLU(), nn.Conv1d(8, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.back(Reverse.apply(self.front(x)))


def test_autograd_functions_of_the_users_keep_their_backward() -> None:
    model = Reversing().requires_grad_(False)
    with pytest.raises(fxmem.CaptureError, match=r"test_regions\.py:\d+ \(in forward\).*Reverse is an autograd function"):
        fxmem.optimize(model, (X,), fullgraph=True)
    _, ours = compare(model, fxmem.optimize(model, (X,)), (X,))
    # The first ReLU's output is handed on as another tensor of the same memory, which nobody keeps.
    assert ours.measurement.kept == 2 * X.numel() // 8


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_in_a_forward(reentrant: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.front = nn.Sequential(nn.Conv1d(8, 8, 1), nn.ReLU(), nn.Conv1d(8, 8, 1))
            self.block = Block()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, self.front(x), use_reentrant=reentrant)

    model = frozen(Model())
    eager, ours = compare(model, fxmem.optimize(model, (X,)), (X,))
    assert ours.measurement.kept < eager.measurement.kept


class Functional(nn.Module):
    """Functions in code that no graph follows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Conv1d(8, 8, 1) for _ in range(3))
        self.p = 0.5

    def forward(self, x: Tensor, keep: bool = False, steps: int = 1) -> Any:
        if x.sum() > 1e9:
            return x
        x = F.dropout(F.relu(self.first(x)), self.p, self.training)
        for _ in range(steps):
            x = self.second(x).relu()
        y = F.relu(self.third(x))
        x = F.max_pool1d(y.exp(), 2)
        return (x, y) if keep else x


def test_functions_in_code_without_a_graph() -> None:
    model = Functional().requires_grad_(False)
    optimized: Any = fxmem.optimize(model, (X,))
    assert type(optimized) is Functional
    assert inspect.signature(optimized.forward) == inspect.signature(model.forward)
    assert {d.op for d in optimized.decisions if d.rewritten and d.source} == {"relu", "dropout", "max_pool"}
    assert all((d.source or __file__).startswith(__file__) for d in optimized.decisions)
    assert any("its own code, with functions of ours" in note for note in optimized.notes)
    _, ours = compare(model, optimized, (X,))
    # The third ReLU hands its output on to an exponential, which keeps its own output alone.
    elements = X.numel()
    assert ours.measurement.kept == 4 * elements // 8 + 4 * elements + elements // 2
    for kwargs in ({"steps": 3}, {"keep": True}, {"keep": True, "steps": 0}):
        compare(model, optimized, (X,), kwargs)
    kept: Any = fxmem.optimize(model, (X,), {"keep": True})
    compare(model, kept, (X,), {"keep": True})
    assert [d.rewritten for d in kept.decisions if d.op == "relu"] == [True, True, False]
    for change in (lambda m: m.eval(), lambda m: m.train(), lambda m: setattr(m, "p", 0.1)):
        change(model)
        change(optimized)
        compare(model, optimized, (X,))
    for twin in (copy.deepcopy(optimized), pickle.loads(pickle.dumps(optimized))):
        _, theirs = compare(model, twin, (X,))
        assert theirs.measurement.kept == ours.measurement.kept
    model.requires_grad_(True)
    compare_runs(run(model, (X,)), run(optimized, (X,)))
    with torch.no_grad():
        assert torch.equal(model.eval()(X), optimized.eval()(X))
    report = fxmem.report(optimized, (X,), {"keep": True}, measured=True)
    assert report.measured is not None
    assert report.measured[0].kept == report.eager.kept


@pytest.mark.parametrize("reentrant", [False, True])
def test_functions_under_a_checkpoint_stay_what_they_are(reentrant: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv1d(8, 8, 1), nn.Conv1d(8, 8, 1)

        def forward(self, x: Tensor) -> Tensor:
            if x.sum() > 1e9:
                return x

            def part(t: Tensor) -> Tensor:
                return self.second(F.dropout(self.first(t), 0.5, self.training)).relu()

            x = part(x) + checkpoint(part, x, use_reentrant=reentrant)
            return F.relu(x).exp()

    model = Model()
    optimized = fxmem.optimize(model, (X,))
    eager, ours = compare(model, optimized, (X,))
    assert ours.measurement.kept < eager.measurement.kept


def test_attention_keeps_its_fast_path() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.head = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.encoder(x)
            return F.relu(self.head(y)).exp() if y.sum() < 1e9 else y

    model, x = Model().eval(), torch.randn(2, 5, 8)
    model.encoder.requires_grad_(False)
    compare(model, fxmem.optimize(model, (x,)), (x,))


@dataclass
class Output:
    loss: Tensor
    parts: tuple[Tensor, dict[str, Tensor]]


def test_outputs_keep_their_structure() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Branching(1)

        def forward(self, x: Tensor, scale: float = 1.0, *, both: bool = False) -> Output:
            out = self.inner(x)
            return Output(out["logits"].sum() * scale, (out["pooled"], out))

    model = frozen(Model())
    optimized = fxmem.optimize(model, (X,), {"both": True})
    got, expected = (m.eval()(X, 3.0) for m in (optimized, model))
    assert type(got) is Output
    assert torch.equal(got.loss, expected.loss)
    assert got.parts[1].keys() == expected.parts[1].keys()


def test_layers_that_are_called_many_times() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act, self.shared, self.conv = nn.ReLU(), nn.ReLU(), nn.Conv1d(8, 8, 1)
            self.alias = self.shared

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(len(list(x))):
                x = self.act(self.conv(x))
            return self.alias(self.conv(self.shared(self.conv(x)))).exp()

    for train in (False, True):
        model = Loop().requires_grad_(train)
        eager, ours = compare(model, fxmem.optimize(model, (X,)), (X,))
        if not train:
            assert ours.measurement.kept == 6 * X.numel() // 8 < eager.measurement.kept


def test_tied_modules_and_bound_methods_lead_to_the_copy() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.mid = nn.Embedding(11, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU())
            self.head = nn.Linear(8, 11, bias=False)
            self.head.weight = self.embed.weight
            self.again = self.mid
            self.run = self._run
            self.part = functools.partial(Tied._run, self)
            self.plain = {"mid": [self.mid]}
            object.__setattr__(self, "hidden", self.mid)

        def _run(self, x: Tensor) -> Tensor:
            return self.mid(x)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.run(self.embed(ids)) + self.part(self.again(self.embed(ids)))
            return self.head(x) if float(x.detach().sum()) > -1e9 else x

    model, ids = Tied().requires_grad_(False), torch.randint(11, (3, 5))
    model.embed.weight.requires_grad_()
    optimized: Any = fxmem.optimize(model, (ids,))
    assert optimized.again is optimized.mid is optimized.hidden is optimized.plain["mid"][0] is not model.mid
    assert optimized.run.__self__ is optimized.part.args[0] is optimized
    assert optimized.head.weight is optimized.embed.weight is model.embed.weight
    compare(model, optimized, (ids,))


def test_regions_of_a_model_that_could_be_traced_whole() -> None:
    model = Block()
    model.requires_grad_(False)
    whole, parts = fxmem.optimize(model, (X,)), fxmem.optimize(model, (X,), capture="regions")
    assert type(parts) is Block
    _, one = compare(model, whole, (X,))
    _, other = compare(model, parts, (X,))
    assert one.measurement.kept == other.measurement.kept
    layer: Any = fxmem.optimize(nn.BatchNorm1d(8).eval().requires_grad_(False), (X,), capture="regions")
    assert layer.decisions[0].rewritten


def test_torch_layers_without_a_graph_are_looked_into() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, activation=F.relu).requires_grad_(False)
    x = cases.randn(5, 3, 8)
    eager, ours = compare(model, fxmem.optimize(model, (x,), capture="regions"), (x,))
    assert ours.measurement.kept < eager.measurement.kept


def test_an_optimizer_comes_along() -> None:
    model = Branching()
    adam = torch.optim.AdamW(model.parameters())
    optimized: Any = fxmem.optimize(model, (X,), optimizer=adam)
    assert isinstance(optimized.optimizer, fxmem.Adapprox)
    loss = optimized(X)["logits"].square().mean()
    loss.backward()
    optimized.optimizer.step()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled() -> None:
    model = frozen(Branching(1)).eval()
    optimized = fxmem.optimize(model, (X,))
    torch._dynamo.reset()
    compiled = torch.compile(optimized, backend="aot_eager")
    eager, ours = run(model, (X,)), run(compiled, (X,))
    torch.testing.assert_close(ours.outputs, eager.outputs)
    torch.testing.assert_close(ours.gradients["input 0"], eager.gradients["input 0"])


def test_errors() -> None:
    with pytest.raises(fxmem.ArgumentError, match="does not run on these example inputs"):
        fxmem.optimize(Branching(), (torch.randn(4, 7, 16),))
    with pytest.raises(fxmem.ArgumentError, match="do not fit"):
        fxmem.optimize(Branching(), (X, 1.0, 2.0))
    with pytest.raises(fxmem.CaptureError, match="cannot be iterated"):
        fxmem.optimize(Branching(), (X,), capture="symbolic")
