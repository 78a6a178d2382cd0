"""Capture: what the graph keeps of the model, and what it refuses."""

from __future__ import annotations

import copy
import pickle
import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from oracle import compare
from torch import Tensor, nn

import fxmem
from fxmem.capture import trace


class Branchy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y if y.sum() > 0 else -y


class ModeReader(nn.Module):
    """Code of its own that depends on the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Any:
        x = F.dropout(self.inner(x), 0.5, training=self.training)
        return (self.head(x), x) if self.training else self.head(x)


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0, flip: bool = False) -> Tensor:
        x = self.layer(x) * scale
        if mask is not None:
            x = x * mask
        return -x if flip else x


def test_control_flow_names_the_line() -> None:
    with pytest.raises(
        fxmem.CaptureError, match=r"test_capture\.py:\d+ \(in forward\).*optimize the traceable submodules"
    ) as info:
        fxmem.optimize(Branchy(), fullgraph=True)
    assert "symbolic tracing cannot follow" in str(info.value)


@pytest.mark.parametrize("context", [torch.no_grad, torch.enable_grad, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_contexts_inside_forward_are_refused(context: Callable[[], Any]) -> None:
    class Switch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            with context():
                y = self.layer(x)
            return y + x

    with (
        torch.no_grad() if context is torch.enable_grad else torch.enable_grad(),
        pytest.raises(fxmem.CaptureError, match="switches"),
    ):
        fxmem.optimize(Switch(), fullgraph=True)


def test_random_numbers_while_tracing_are_refused() -> None:
    class Noise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.randn(3)

    state = torch.get_rng_state()
    with pytest.raises(fxmem.CaptureError, match="draws random numbers"):
        fxmem.optimize(Noise(), fullgraph=True)
    assert torch.equal(state, torch.get_rng_state())


def test_constants_stay_off_the_model_and_out_of_the_state_dict() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + torch.tensor([1.0, 2.0, 3.0])

    model = Constant()
    before = set(vars(model))
    optimized = fxmem.optimize(model)
    assert set(vars(model)) == before
    assert list(optimized.state_dict()) == ["layer.weight", "layer.bias"]
    compare(model, optimized, (torch.randn(2, 3, requires_grad=True),))


def test_plain_tensor_attributes_do_not_become_buffers() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self.shift = torch.ones(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + self.shift

    model = Plain()
    optimized = fxmem.optimize(model)
    assert list(optimized.state_dict()) == ["layer.weight", "layer.bias"]
    compare(model, optimized, (torch.randn(2, 3, requires_grad=True),))


def test_tied_parameters_stay_tied() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    optimized = fxmem.optimize(model)
    assert optimized.get_parameter("0.weight") is optimized.get_parameter("1.weight") is model[0].weight
    compare(model, optimized, (torch.randn(2, 4),))


def test_one_module_under_two_names_stays_one() -> None:
    block = nn.Sequential(nn.Conv1d(2, 2, 1), nn.ReLU())
    model = nn.ModuleDict({"a": block, "b": block})

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: Tensor) -> Tensor:
            return self.parts["b"](self.parts["a"](x))

    outer = Twice()
    optimized = fxmem.optimize(outer)
    assert optimized.get_submodule("parts.a") is optimized.get_submodule("parts.b")
    compare(outer, optimized, (torch.randn(2, 2, 5),))


def test_unused_parts_stay_in_the_state_dict() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Linear(2, 2)
            self.unused = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
            self.register_buffer("count", torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    model = Unused()
    optimized = fxmem.optimize(model)
    assert list(optimized.state_dict()) == list(model.state_dict())
    assert [name for name, _ in optimized.named_modules()] == [name for name, _ in model.named_modules()]


def test_in_place_operators_stay_in_place() -> None:
    class InPlace(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            z = y.view(-1)
            y += 1
            y *= 3
            return z

    model = InPlace()
    compare(model, fxmem.optimize(model), (torch.randn(2, 2, requires_grad=True),))


def test_source_lines_are_recorded() -> None:
    optimized = fxmem.optimize(ModeReader().eval())
    sources = [d.source for d in optimized.decisions]
    assert sources
    assert all(source is not None and "test_capture.py:" in source for source in sources)


def test_optional_arguments_are_fixed_and_say_so() -> None:
    model = Optional()
    x, mask = torch.randn(2, 4, requires_grad=True), torch.rand(2, 4)
    plain = fxmem.optimize(model)
    compare(model, plain, (x,))
    compare(model, plain, (x,), {"scale": 2.0})
    with pytest.raises(fxmem.ArgumentError, match="mask: the graph was captured with None here and cannot take a tensor"):
        plain(x, mask)
    with pytest.raises(fxmem.ArgumentError, match=r"flip: .*Pass flip among the example inputs of fxmem\.optimize"):
        plain(x, flip=True)
    compare(model, pickle.loads(pickle.dumps(plain)), (x,))
    masked = fxmem.optimize(model, (x,), {"mask": mask})
    compare(model, masked, (x, mask))
    flipped = fxmem.optimize(model, (x,), {"flip": True})
    compare(model, flipped, (x,), {"flip": True})


@pytest.mark.parametrize("start", ["train", "eval"])
def test_baked_modes_follow_the_flags(start: str) -> None:
    model = ModeReader().train(start == "train")
    model.inner.requires_grad_(False)
    optimized = fxmem.optimize(model, torch.randn(3, 8, requires_grad=True))
    x = torch.randn(3, 8, requires_grad=True)
    for mode in (True, False, True, True, False):
        model.train(mode)
        optimized.train(mode)
        compare(model, optimized, (x,))


def test_flags_of_a_part_are_seen() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = ModeReader(), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            return self.b(y[0] if isinstance(y, tuple) else y)

    model = Outer()
    optimized = fxmem.optimize(model)
    x = torch.randn(3, 8)
    for flag in (False, True):
        model.a.train(flag)
        optimized.get_submodule("a").train(flag)
        compare(model, optimized, (x,))


def test_replacing_a_module_keeps_the_wrapper_honest() -> None:
    model = ModeReader()
    optimized = fxmem.optimize(model)
    optimized.head = nn.Linear(8, 2)
    optimized(torch.randn(2, 8))
    optimized.eval()
    with pytest.raises(fxmem.CaptureError, match="head: this module was replaced"):
        optimized(torch.randn(2, 8))
    with pytest.raises(fxmem.CaptureError, match="head: this module was replaced"):
        fxmem.optimize(optimized)


def test_containers_with_hooks_run_as_they_are() -> None:
    seen: list[Any] = []
    model = nn.Sequential(nn.Sequential(nn.Conv1d(2, 2, 1), nn.ReLU()), nn.Conv1d(2, 2, 1)).requires_grad_(False)
    model[0].register_forward_hook(lambda module, args, output: seen.append(output.shape))
    optimized = fxmem.optimize(model)
    assert not seen
    x = torch.randn(2, 2, 5, requires_grad=True)
    compare(model, optimized, (x,))
    assert seen == [(2, 2, 5)] * 2
    assert [d.reason for d in optimized.decisions if d.module == "0"] == [
        "not looked into: it has hooks, which must run on real tensors"
    ]


def test_replaced_forward_on_the_root_is_refused() -> None:
    model = nn.Linear(2, 2)
    model.forward = lambda x: x  # type: ignore[method-assign]
    with pytest.raises(fxmem.CaptureError, match="replaced on the instance"):
        fxmem.optimize(model)


def test_tracing_leaves_no_trace_on_torch() -> None:
    before = dict(vars(nn.Module))
    trace(ModeReader())
    with pytest.raises(fxmem.CaptureError):
        trace(Branchy())
    assert dict(vars(nn.Module)) == before
    assert "training" not in vars(nn.Module)


def test_python_randomness_does_not_matter_to_the_check() -> None:
    random.seed(0)
    assert fxmem.optimize(nn.Linear(2, 2)) is not None


class Point(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass
class Result:
    logits: Tensor
    hidden: tuple[Tensor, ...] | None = None


@pytest.mark.parametrize(
    "build",
    [
        lambda y: OrderedDict([("out", y), ("aux", (y + 1, {"deep": [y * 2, None, 3]}))]),
        lambda y: {"a": y, "b": None},
        lambda y: [y, (y, "text")],
        lambda y: Point(y, y + 1),
        lambda y: Result(y, (y * 2,)),
        lambda y: None if y is None else (y,),
    ],
)
def test_outputs_keep_their_structure(build: Callable[[Tensor], Any]) -> None:
    class Structured(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Any:
            return build(self.layer(x))

    model, x = Structured(), torch.randn(3, 2, requires_grad=True)
    for optimized in (fxmem.optimize(model), fxmem.optimize(model, x), copy.deepcopy(fxmem.optimize(model))):
        expected, actual = model(x), optimized(x)
        assert type(actual) is type(expected)
        assert repr(actual) == repr(expected)
        if not isinstance(expected, Result):
            compare(model, optimized, (x,))


def test_a_lone_layer_that_cannot_be_traced_says_what_to_do() -> None:
    model = nn.BatchNorm2d(3).eval()
    with pytest.raises(fxmem.CaptureError, match=r"Wrap it in nn\.Sequential"):
        fxmem.optimize(model, fullgraph=True)
    assert not [name for name in vars(model) if name.startswith("_tensor_constant")]


def test_a_lone_layer_is_served_where_it_can_be() -> None:
    layer, x = nn.Conv2d(2, 3, 3).requires_grad_(False), torch.randn(1, 2, 5, 5, requires_grad=True)
    assert compare(layer, fxmem.optimize(layer), (x,))[1].measurement.kept == 0


def test_buffers_are_read_and_changed_on_every_call() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls.add_(1)
            return self.layer(x) * (self.calls * 2)

    model, x = Counting(), torch.randn(3, 2, requires_grad=True)
    optimized = fxmem.optimize(model, x)
    assert model.calls == 0
    compare(model, optimized, (x,))
    optimized(x)
    assert model.calls == 1


def test_rebinding_a_buffer_is_refused() -> None:
    class Rebinding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls = self.calls + 1
            return x * self.calls

    model = Rebinding()
    with pytest.raises(fxmem.CaptureError, match=r"calls: the forward puts another tensor in the place .* self\.calls\.add_"):
        fxmem.optimize(model, fullgraph=True)
    assert isinstance(model.calls, Tensor)
    assert model.calls == 0
    assert torch.equal(model(torch.ones(2)), torch.ones(2))


def test_attributes_set_by_the_forward_are_noted() -> None:
    class Remembering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Module()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            self.inner.seen = self.layer(x)
            return self.inner.seen + 1

    model, x = Remembering(), torch.randn(3, 2, requires_grad=True)
    optimized = fxmem.optimize(model, x)
    assert not hasattr(model.inner, "seen")
    assert optimized.notes == ("the forward sets inner.seen on every call; the graph does not",)
    compare(model, optimized, (x,))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_are_not_lost(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(lambda t: self.layer(t).relu().exp(), x, use_reentrant=reentrant)

    with pytest.raises(fxmem.CaptureError, match="symbolic tracing would lose"):
        fxmem.optimize(Model(), fullgraph=True)
    x = torch.randn(4, 8, requires_grad=True)
    report = fxmem.report(Model(), x)
    assert report.fxmem is not None
    assert report.eager.kept == report.fxmem.kept == 0
    assert report.eager.peak is not None
    assert report.eager.gradients == 4 * (4 * 8 + 8 * 8 + 8)


def test_save_on_cpu_is_not_lost() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autograd.graph.save_on_cpu():
                return x.exp()

    with pytest.raises(fxmem.CaptureError, match="saved-tensor hooks"):
        fxmem.optimize(Model(), fullgraph=True)
