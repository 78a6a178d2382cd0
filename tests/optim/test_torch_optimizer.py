"""The generic checks that torch runs on its own optimizers, on an OptimizerInfo for Adapprox."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR

from fxmem.errors import OptimizerError
from fxmem.optim import Adapprox

# torch's own test helpers import it; it is in the `test` extra.
pytest.importorskip("expecttest")

from torch.testing._internal.common_optimizers import (
    OptimizerErrorEnum,
    OptimizerInfo,
    OptimizerInput,
    get_error_inputs_for_all_optims,
)


def _inputs(device, dtype=None):
    options = [
        {},
        {"lr": 0.01},
        {"lr": torch.tensor(0.001)},
        {"weight_decay": 0.1},
        {"weight_decay": 0.1, "maximize": True},
        {"betas": (0.0, 0.99)},
        {"guidance": True},
        {"rank": "paper"},
        {"rank": 1},
        {"rank": 0},
        {"clip_threshold": float("inf"), "eps": 1e-4},
        {"momentum_dtype": torch.bfloat16},
    ]
    return [OptimizerInput(params=None, kwargs=kwargs, desc=str(kwargs)) for kwargs in options]


INFO = OptimizerInfo(
    Adapprox,
    optim_inputs_func=_inputs,
    scheduler_inputs=(
        [lambda opt: StepLR(opt, gamma=0.9, step_size=10)],
        [lambda opt: StepLR(opt, gamma=0.9, step_size=10), lambda opt: ReduceLROnPlateau(opt)],
    ),
    supported_impls=(),
    supports_complex=False,
    optim_error_inputs_func=get_error_inputs_for_all_optims,
)
INPUTS = INFO.optim_inputs_func(device="cpu")
each_input = pytest.mark.parametrize("given", INPUTS, ids=lambda given: given.desc)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)


def kwargs_of(given):
    return copy.deepcopy(given.kwargs)


def model_and_closure(opt_of, dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)
    x, y = torch.randn(32, 12, dtype=dtype), torch.randn(32, 4, dtype=dtype)
    opt = opt_of(model)

    def closure():
        opt.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss

    return model, opt, closure


@each_dtype
@each_input
@pytest.mark.parametrize("schedulers", INFO.scheduler_inputs, ids=["step", "plateau"])
def test_goes_in_the_right_direction(given, schedulers, dtype):
    _, opt, closure = model_and_closure(lambda m: Adapprox(m.parameters(), **kwargs_of(given)), dtype)
    if isinstance(opt.param_groups[0]["lr"], torch.Tensor):
        schedulers = schedulers[:1]
    built = [make(opt) for make in schedulers]
    first = float(closure().detach())
    for _ in range(20):
        loss = opt.step(closure)
        for scheduler in built:
            scheduler.step(loss.detach()) if isinstance(scheduler, ReduceLROnPlateau) else scheduler.step()
    last = float(closure().detach())
    assert (last > first) if opt.param_groups[0]["maximize"] else (last < first)


@pytest.mark.parametrize("shape", [(10, 5), (10,), (), (4, 6, 3), (4, 3, 2, 2)], ids=str)
@each_input
def test_tensor_and_float_lr_agree(given, shape):
    options = {**kwargs_of(given), "lr": 0.01}
    start = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    a, b = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    plain, tensor = Adapprox([a], **options), Adapprox([b], **{**options, "lr": torch.tensor(0.01)})
    for _ in range(5):
        a.grad, b.grad = a.detach() * 2, b.detach() * 2
        plain.step()
        tensor.step()
    torch.testing.assert_close(a, b)


@each_dtype
@each_input
def test_state_dict_round_trip(given, dtype):
    model, opt, closure = model_and_closure(lambda m: Adapprox(m.named_parameters(), **kwargs_of(given)), dtype)
    for _ in range(7):
        opt.step(closure)
    buffer = io.BytesIO()
    torch.save(opt.state_dict(), buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    other, again, closure2 = model_and_closure(lambda m: Adapprox(m.named_parameters(), **kwargs_of(given)), dtype)
    other.load_state_dict(model.state_dict())
    again.load_state_dict(saved)
    for p, q in zip(opt.state.values(), again.state.values(), strict=True):
        assert {k: (v.dtype, v.shape) for k, v in p.items()} == {k: (v.dtype, v.shape) for k, v in q.items()}
    for _ in range(12):
        opt.step(closure)
        again.step(closure2)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
    # Loading makes a copy: what was saved does not move.
    reread = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    for key, state in reread["state"].items():
        for name, value in state.items():
            assert torch.equal(value, saved["state"][key][name])


@each_input
def test_deepcopy_and_pickle(given):
    _, opt, closure = model_and_closure(lambda m: Adapprox(m.parameters(), **kwargs_of(given)))
    opt.step(closure)
    for copied in (copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
        assert copied.state_dict()["param_groups"] == opt.state_dict()["param_groups"]
        for p in copied.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        copied.step()


def test_param_groups_take_their_options():
    weight, bias = nn.Parameter(torch.randn(10, 5)), nn.Parameter(torch.randn(10))
    frozen_weight = weight.detach().clone()
    opt = Adapprox([{"params": [weight], "lr": 0.0}, {"params": [bias]}], lr=0.01)
    for _ in range(5):
        weight.grad, bias.grad = torch.ones_like(weight), torch.ones_like(bias)
        opt.step()
    assert torch.equal(weight, frozen_weight)
    assert opt.param_groups[1]["lr"] == 0.01


def test_step_hooks_and_state_dict_hooks_run_in_order():
    p = nn.Parameter(torch.randn(8, 8))
    opt = Adapprox([p])
    p.grad = torch.ones_like(p)
    seen = []
    opt.register_step_pre_hook(lambda o, args, kwargs: seen.append("pre"))
    opt.register_step_post_hook(lambda o, args, kwargs: seen.append("post"))
    opt.register_state_dict_pre_hook(lambda o: seen.append("save pre"))
    opt.register_state_dict_post_hook(lambda o, d: seen.append("save post"))
    opt.register_load_state_dict_pre_hook(lambda o, d: seen.append("load pre"))
    opt.register_load_state_dict_post_hook(lambda o: seen.append("load post"))
    opt.step()
    opt.load_state_dict(opt.state_dict())
    assert seen == ["pre", "post", "save pre", "save post", "load pre", "load post"]


@pytest.mark.parametrize(
    "given", get_error_inputs_for_all_optims("cpu", torch.float32), ids=lambda given: given.optimizer_error_input.desc
)
def test_torchs_own_error_inputs(given):
    case = given.optimizer_error_input
    params = [nn.Parameter(torch.randn(1, 1))] if case.params is None else case.params
    assert given.error_on == OptimizerErrorEnum.CONSTRUCTION_ERROR
    if issubclass(given.error_type, Warning):
        with pytest.warns(given.error_type, match=given.error_regex):
            Adapprox(params, **case.kwargs)
    else:
        with pytest.raises(given.error_type, match=given.error_regex):
            Adapprox(params, **case.kwargs)


def test_grad_none_is_skipped_and_zero_grad_decays():
    a, b = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))
    before = b.detach().clone()
    opt = Adapprox([a, b], weight_decay=0.1, lr=0.1)
    a.grad = torch.zeros_like(a)
    start = a.detach().clone()
    opt.step()
    assert torch.equal(b, before)
    assert b not in opt.state
    torch.testing.assert_close(a.detach(), start * 0.99)


def test_closure_value_is_returned_with_gradients_enabled():
    p = nn.Parameter(torch.randn(4, 4))
    opt = Adapprox([p])

    def closure():
        assert torch.is_grad_enabled()
        opt.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    assert opt.step(closure).item() > 0


def test_schedulers_that_change_lr_and_betas():
    p = nn.Parameter(torch.randn(32, 24))
    opt = Adapprox([p], lr=0.01)
    cycle = OneCycleLR(opt, max_lr=0.1, total_steps=12)
    for _ in range(10):
        p.grad = p.detach().clone()
        opt.step()
        cycle.step()
    assert opt.param_groups[0]["betas"][0] != 0.9
    opt = Adapprox([p], lr=torch.tensor(0.01))
    LambdaLR(opt, lambda step: 0.5)
    assert float(opt.param_groups[0]["lr"]) == pytest.approx(0.005)


def test_complex_and_sparse_are_refused():
    with pytest.raises(OptimizerError):
        Adapprox([nn.Parameter(torch.randn(2, 2, dtype=torch.complex64))])
    assert not INFO.supports_complex
    assert not INFO.supports_sparse
