"""What comes out of optimize is still the model: state, flags, hooks, copies, errors."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import compare, compare_runs
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, spectral_norm, weight_norm

import fxmem
from fxmem.measure import run
from fxmem.passes.recompute import RECIPES


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), nn.ReLU()
        )
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.features(x)).flatten(1)
        return self.head(self.drop(x))


def _frozen() -> Small:
    return Small().eval().requires_grad_(False)


def _x() -> Tensor:
    return torch.randn(2, 3, 14, 14, requires_grad=True)


@pytest.fixture(params=["bytes", "structure"])
def optimized(request: Any) -> tuple[Small, fxmem.OptimizedModule]:
    model = _frozen()
    return model, fxmem.optimize(model, _x()) if request.param == "bytes" else fxmem.optimize(model)


def test_same_tensors_by_identity(optimized: tuple[Small, fxmem.OptimizedModule]) -> None:
    model, ours = optimized
    assert [(n, id(p)) for n, p in model.named_parameters()] == [(n, id(p)) for n, p in ours.named_parameters()]
    assert [(n, id(b)) for n, b in model.named_buffers()] == [(n, id(b)) for n, b in ours.named_buffers()]
    assert list(model.state_dict()) == list(ours.state_dict())
    assert isinstance(ours, torch.fx.GraphModule)


def test_the_model_is_left_as_it_is() -> None:
    model = _frozen()
    classes = [type(m) for m in model.modules()]
    ours = fxmem.optimize(model, _x())
    assert [type(m) for m in model.modules()] == classes
    assert [m.training for m in model.modules()] == [False] * len(classes)
    ours.train()
    assert not any(m.training for m in model.modules())
    assert all(isinstance(b, type(a)) for a, b in zip(model.features, ours.get_submodule("features"), strict=True))


def test_load_state_dict_both_ways(optimized: tuple[Small, fxmem.OptimizedModule]) -> None:
    model, ours = optimized
    other = Small()
    ours.load_state_dict(other.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))
    third = Small()
    third.load_state_dict(ours.state_dict())
    compare(third.eval().requires_grad_(False), ours, (_x(),))


def test_deepcopy_shares_nothing(optimized: tuple[Small, fxmem.OptimizedModule]) -> None:
    model, ours = optimized
    twin = copy.deepcopy(ours)
    compare(model, twin, (_x(),))
    assert not {id(p) for p in twin.parameters()} & {id(p) for p in ours.parameters()}
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    compare(model, ours, (_x(),))
    assert twin.decisions == ours.decisions


def test_pickle_and_save(optimized: tuple[Small, fxmem.OptimizedModule]) -> None:
    model, ours = optimized
    x = _x()
    kept = run(ours, (x,)).measurement.kept
    for twin in (pickle.loads(pickle.dumps(ours)), _saved(ours)):
        assert isinstance(twin, fxmem.OptimizedModule)
        assert list(twin.state_dict()) == list(ours.state_dict())
        assert twin.decisions == ours.decisions
        assert compare(model, twin, (x,))[1].measurement.kept == kept
        for mode in (True, False):
            model.train(mode)
            twin.train(mode)
            compare(model, twin, (x,))


def _saved(module: nn.Module) -> Any:
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def test_hooks_on_rewritten_modules_fire() -> None:
    model = _frozen()
    seen: list[str] = []
    conv, relu = model.features[0], model.features[5]
    handles = [
        conv.register_forward_pre_hook(lambda m, args: seen.append("pre")),
        conv.register_forward_hook(lambda m, args, out: seen.append("forward")),
        relu.register_full_backward_hook(lambda m, gin, gout: seen.append("backward")),
        model.register_forward_hook(lambda m, args, out: seen.append("root")),
    ]
    ours = fxmem.optimize(model, _x())
    assert not seen
    compare(model, ours, (_x(),))
    assert seen == ["pre", "forward", "root", "backward"] * 2
    for handle in handles:
        handle.remove()
    run(ours, (_x(),))
    assert len(seen) == 8
    ours.get_submodule("features.0").register_forward_hook(lambda m, args, out: seen.append("late"))
    run(ours, (_x(),))
    assert seen[8:] == ["late"]


def test_hooks_registered_later_on_what_the_graph_looked_into_fire() -> None:
    """``fully_shard`` gathers parameters in such hooks."""
    model = _frozen()
    ours = fxmem.optimize(model, _x())
    kept = fxmem.measure(ours, _x()).kept
    seen: list[str] = []
    ours.get_submodule("features").register_forward_hook(lambda m, args, out: seen.append("late"))
    compare(model, ours, (_x(),))
    assert seen == ["late"] * 2  # the model shares its hooks
    run(copy.deepcopy(ours), (_x(),))
    assert len(seen) == 3
    assert fxmem.measure(ours, _x()).kept == kept


def test_hooks_registered_later_end_a_policy_and_the_notes_say_so() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64)), nn.ReLU())
    x = torch.randn(64, 64, requires_grad=True)
    ours = fxmem.optimize(model, x, policy="recompute")
    compare(model, ours, (x,))
    assert not ours.notes
    assert RECIPES in ours._modules
    ours.get_submodule("0").register_forward_hook(lambda m, args, out: None)
    compare(model, ours, (x,))
    assert "policy 'exact'" in ours.notes[-1]


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("norm", [weight_norm, spectral_norm, parametrizations.weight_norm, parametrizations.spectral_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def test_normalized_weights(norm: Any, requires_grad: bool) -> None:
    model = nn.Sequential(norm(nn.Conv2d(2, 3, 3)), nn.ReLU(), nn.Flatten(), norm(nn.Linear(27, 2)))
    model.requires_grad_(requires_grad)
    ours = fxmem.optimize(model)
    x = torch.randn(2, 2, 5, 5, requires_grad=True)
    for mode in (True, False):
        model.train(mode)
        ours.train(mode)
        compare(model, ours, (x,))
    refused = {d.module: d.reason for d in ours.decisions if d.op in ("conv", "linear")}
    assert set(refused) == {"0", "3"}
    assert all(reason.startswith("not rewritten: ") for reason in refused.values())


def test_own_parametrization() -> None:
    class Symmetric(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return w.triu() + w.triu(1).transpose(-1, -2)

    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    compare(model, fxmem.optimize(model), (torch.randn(2, 4, requires_grad=True),))


@pytest.mark.parametrize("plan", ["bytes", "structure"])
def test_freezing_and_unfreezing_afterwards(plan: str) -> None:
    model = Small().train()
    x = _x()
    ours = fxmem.optimize(model, x) if plan == "bytes" else fxmem.optimize(model)
    names = list(dict(model.named_parameters()))
    for chosen in ([], names[:1], names[-2:], names[2:4], names):
        for name, p in model.named_parameters():
            p.requires_grad_(name in chosen)
        for mode in (True, False):
            model.train(mode)
            ours.train(mode)
            compare_runs(run(model, (x,)), run(ours, (x,)))


@pytest.mark.parametrize("plan", ["bytes", "structure"])
def test_unfreezing_a_frozen_model(plan: str) -> None:
    model = _frozen()
    x = _x()
    ours = fxmem.optimize(model, x) if plan == "bytes" else fxmem.optimize(model)
    model.requires_grad_(True)
    compare_runs(run(model, (x,)), run(ours, (x,)))


def test_optimizing_again_is_the_same_or_better() -> None:
    model = Small().eval()
    x = _x()
    ours = fxmem.optimize(model, x)
    again = fxmem.optimize(ours, x)
    assert again.code == ours.code
    assert again.decisions == ours.decisions
    assert [(n, id(p)) for n, p in again.named_parameters()] == [(n, id(p)) for n, p in ours.named_parameters()]
    assert compare(model, again, (x,))[1].measurement == run(ours, (x,)).measurement
    model.requires_grad_(False)
    better = fxmem.optimize(ours, x)
    assert run(better, (x,)).measurement.kept < run(ours, (x,)).measurement.kept
    assert run(better, (x,)).measurement == run(fxmem.optimize(model, x), (x,)).measurement
    ours.train()
    assert fxmem.optimize(ours).training


def test_inference_and_no_grad() -> None:
    model = _frozen()
    ours = fxmem.optimize(model)
    x = _x()
    with torch.no_grad():
        assert torch.equal(model(x), ours(x))
    with torch.inference_mode():
        assert torch.equal(model(x), ours(x))


def test_fake_example_inputs() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = _frozen()
    x = _x()
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
    assert fxmem.optimize(model, fake).decisions == fxmem.optimize(model, x).decisions


class _Picky(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y[y.sum(-1) > 0].relu()


def test_data_dependent_ops_go_by_structure() -> None:
    model, x = _Picky(), torch.randn(4, 8)
    ours = fxmem.optimize(model, x)
    assert any("depends on the data" in note for note in ours.notes)
    compare(model, ours, (x,))
    with pytest.raises(
        fxmem.ArgumentError, match=r"getitem \(.*test_optimize\.py:\d+\): .* depends on the data.*measured=True"
    ):
        fxmem.report(model, x)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (3, "model: expected a torch.nn.Module, got an object of type int"),
        (nn.Linear, "got the class Linear"),
        (torch.jit.script, "function"),
        (nn.LazyLinear(3), "weight: this lazy parameter has no shape yet"),
    ],
)
def test_bad_models(bad: Any, message: str) -> None:
    with pytest.raises(fxmem.ArgumentError, match=message):
        fxmem.optimize(bad)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_script_module() -> None:
    scripted = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(fxmem.ArgumentError, match="ScriptModule"):
        fxmem.optimize(scripted)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((_x(), _x()), {}, "do not fit Small.forward"),
        ((), {"y": 1}, "do not fit Small.forward"),
        ((torch.randn(2, 4, 14, 14),), {}, "does not run on these example inputs"),
        ((torch.randn(2, 3, 1, 1),), {}, "does not run on these example inputs"),
    ],
)
def test_bad_inputs(args: tuple[Any, ...], kwargs: dict[str, Any], message: str) -> None:
    model = _frozen()
    with pytest.raises(fxmem.ArgumentError, match=message):
        fxmem.optimize(model, args, kwargs)
    compare(model, fxmem.optimize(model), (_x(),))


def test_unknown_choices() -> None:
    with pytest.raises(fxmem.ArgumentError, match=r"policy: unknown value 'fast'. Choose one of exact"):
        fxmem.optimize(_frozen(), policy="fast")
    with pytest.raises(fxmem.ArgumentError, match="capture: unknown value 'magic'"):
        fxmem.optimize(_frozen(), capture="magic")


def test_errors_survive_pickling() -> None:
    error = fxmem.CaptureError("reason.", where="here", remedy="Do this.")
    assert str(pickle.loads(pickle.dumps(error))) == str(error) == "here: reason. Do this."


def test_training_loop_matches_eager(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, reference = Small(), Small()
    reference.load_state_dict(model.state_dict())
    for m in (model, reference):
        m.features[0].requires_grad_(False)
    ours = fxmem.optimize(model, torch.randn(4, 3, 14, 14))
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2) for m in (ours, reference)]
    for step in range(4):
        x = torch.randn(4, 3, 14, 14)
        for m, optimizer in zip((ours, reference), optimizers, strict=True):
            torch.manual_seed(step)
            m(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), reference.state_dict().values(), strict=True))


def test_nothing_outlives_the_model() -> None:
    model, x = _frozen(), _x()
    ours = fxmem.optimize(model, x)
    fxmem.report(model, x)
    run(ours, (x,))
    parameter = weakref.ref(model.head.weight)
    del model, ours
    gc.collect()
    assert parameter() is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_scripted_part_of_a_model() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU()))
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), scripted, nn.Conv2d(4, 2, 1)).requires_grad_(False)
    compare(model, fxmem.optimize(model), (torch.randn(2, 3, 5, 5, requires_grad=True),))
