"""Optimized models in the training loops that people have: the same weights as eager, step by step."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import same
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fxmem

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")


def net() -> nn.Sequential:
    """A frozen stem in eval mode, a trainable head in train mode."""
    torch.manual_seed(0)
    stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)).eval().requires_grad_(False)
    return nn.Sequential(
        nn.Conv2d(3, 3, 1),
        stem,
        nn.Conv2d(8, 8, 3),
        nn.BatchNorm2d(8),
        nn.LeakyReLU(),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(72, 5),
    )


def batches(count: int = 4) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 3, 12, 12, generator=g), torch.randint(5, (4,), generator=g)) for _ in range(count)]


X = batches(1)[0][0]


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def both(loop: Callable[[nn.Module], Any]) -> tuple[Any, Any]:
    """What ``loop`` returns for eager and for the optimized model, after asserting that it left the same state."""
    results, states = [], []
    for wrap in (lambda m: m, lambda m: fxmem.optimize(m, (X,))):
        model = wrap(net())
        torch.manual_seed(3)
        results.append(loop(model))
        states.append((dict(model.state_dict()), {n: p.grad for n, p in model.named_parameters()}, torch.get_rng_state()))
    assert list(states[0][0]) == list(states[1][0])
    assert same(states[0], states[1])
    return results[0], results[1]


def step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    return loss


def test_the_fixture_is_worth_it() -> None:
    eager, ours = fxmem.measure(net(), (X,)), fxmem.measure(fxmem.optimize(net(), (X,)), (X,))
    assert ours.kept < 0.7 * eager.kept


def test_grad_scaler() -> None:
    def loop(model: nn.Module) -> list[float]:
        opt = torch.optim.SGD(trained(model), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=2)
        scales = []
        for i, (x, y) in enumerate(batches(6)):
            opt.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = nn.functional.cross_entropy(model(x), y)
            scaler.scale(loss * (float("inf") if i == 2 else 1)).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(trained(model), 1.0)
            scaler.step(opt)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales

    eager, ours = both(loop)
    assert eager == ours
    assert ours == [2.0**n for n in (14, 15, 14, 14, 15, 15)]  # it backs off at the infinite loss


@pytest.mark.parametrize("name", ["OneCycleLR", "CosineAnnealingLR", "ReduceLROnPlateau", "LambdaLR"])
def test_schedulers(name: str) -> None:
    def loop(model: nn.Module) -> list[float]:
        opt = fxmem.Adapprox(trained(model), lr=0.01)
        options: dict[str, Any] = {
            "OneCycleLR": {"max_lr": 0.02, "total_steps": 6},
            "CosineAnnealingLR": {"T_max": 4},
            "ReduceLROnPlateau": {"patience": 0, "threshold": 0.5},
            "LambdaLR": {"lr_lambda": lambda n: 0.5**n},
        }[name]
        scheduler = getattr(torch.optim.lr_scheduler, name)(opt, **options)
        rates = []
        for x, y in batches(5):
            opt.zero_grad()
            loss = step(model, x, y)
            opt.step()
            scheduler.step(*([loss.item()] if name == "ReduceLROnPlateau" else []))
            rates.append(opt.param_groups[0]["lr"])
        return rates

    eager, ours = both(loop)
    assert eager == ours
    assert len(set(ours)) > 1


def test_ema() -> None:
    def loop(model: nn.Module) -> dict[str, Tensor]:
        opt = torch.optim.SGD(trained(model), lr=0.1)
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
        for x, y in batches():
            opt.zero_grad()
            step(model, x, y)
            opt.step()
            ema.update_parameters(model)
        torch.optim.swa_utils.update_bn([x for x, _ in batches(2)], ema)
        ema.eval()
        return {**ema.state_dict(), "output": ema(X)}

    eager, ours = both(loop)
    assert same(eager, ours)
    assert not same(ours["output"], net().eval()(X))


def test_clipping_and_accumulation() -> None:
    def loop(model: nn.Module) -> list[Tensor]:
        decayed = [p for p in trained(model) if p.ndim > 1]
        plain = [p for p in trained(model) if p.ndim == 1]
        opt = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.3}, {"params": plain, "weight_decay": 0.0, "lr": 0.02}])
        norms = []
        for i, (x, y) in enumerate(batches(6)):
            step(model, x, y)
            if i % 2:
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
                opt.step()
                opt.zero_grad()
        return norms

    assert same(*both(loop))


def test_gradual_unfreezing() -> None:
    def loop(model: nn.Module) -> None:
        opt = torch.optim.SGD(model.parameters(), lr=0.05)
        for i, (x, y) in enumerate(batches(6)):
            opt.zero_grad()
            step(model, x, y)
            opt.step()
            if i == 1:
                model.get_submodule("1.0").requires_grad_(True)
            if i == 2:
                model.get_submodule("1").requires_grad_(True)
                model.get_submodule("1").train()
            if i == 4:
                model.get_submodule("2").requires_grad_(False)

    both(loop)


def test_copies_train_on_their_own() -> None:
    optimized = fxmem.optimize(net(), (X,))
    file = io.BytesIO()
    torch.save(optimized, file)
    file.seek(0)
    copies = [
        copy.deepcopy(optimized),
        pickle.loads(pickle.dumps(optimized)),
        torch.load(file, weights_only=False),
    ]
    before = {n: t.clone() for n, t in optimized.state_dict().items()}
    eager = net()
    for model in (eager, *copies):
        torch.manual_seed(3)
        opt = torch.optim.SGD(trained(model), lr=0.1)
        for x, y in batches(2):
            step(model, x, y)
            opt.step()
        assert same(dict(model.state_dict()), dict(eager.state_dict()))
    assert same(dict(optimized.state_dict()), before)
    for model in copies:
        assert fxmem.measure(model, (X,)).kept == fxmem.measure(optimized, (X,)).kept


@pytest.mark.parametrize("assign", [False, True])
def test_state_dict_files(assign: bool, tmp_path: Path) -> None:
    optimized = fxmem.optimize(net(), (X,))
    opt = torch.optim.SGD(trained(optimized), lr=0.1)
    step(optimized, *batches(1)[0])
    opt.step()
    torch.save(optimized.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    plain, again = net(), fxmem.optimize(net(), (X,))
    for model in (plain, again):
        assert not any(model.load_state_dict(state, assign=assign))
    outputs = []
    for model in (optimized, plain, again):
        torch.manual_seed(5)
        outputs.append(model(X).detach())
    assert same(outputs[0], outputs[1])
    assert same(outputs[0], outputs[2])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_cast_afterwards(dtype: torch.dtype) -> None:
    def loop(model: nn.Module) -> Tensor:
        model.to(dtype)
        x = X.to(dtype).requires_grad_()
        out = model(x)
        out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(dtype))
        assert out.dtype == dtype
        assert x.grad is not None
        return x.grad

    assert same(*both(loop))


def test_half_and_bfloat16_methods() -> None:
    for cast in (nn.Module.half, nn.Module.bfloat16, nn.Module.double):
        optimized = cast(fxmem.optimize(net(), (X,)))
        assert {p.dtype for p in optimized.parameters()} == {p.dtype for p in cast(net()).parameters()}


def test_save_on_cpu() -> None:
    def loop(model: nn.Module) -> None:
        opt = torch.optim.SGD(trained(model), lr=0.1)
        for x, y in batches(2):
            opt.zero_grad()
            with torch.autograd.graph.save_on_cpu():
                step(model, x, y)
            opt.step()

    both(loop)


def test_accelerate() -> None:
    def loop(model: nn.Module) -> list[float]:
        accelerate.state.AcceleratorState._reset_state(True)
        worker = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision="bf16")
        opt = fxmem.Adapprox(trained(model), lr=0.01)
        scheduler = torch.optim.lr_scheduler.LinearLR(opt, total_iters=4)
        prepared, opt, scheduler = worker.prepare(model, opt, scheduler)
        losses = []
        for x, y in batches(6):
            with worker.accumulate(prepared):
                loss = nn.functional.cross_entropy(prepared(x), y)
                worker.backward(loss)
                worker.clip_grad_norm_(prepared.parameters(), 1.0)
                opt.step()
                scheduler.step()
                opt.zero_grad()
            losses.append(loss.item())
        assert worker.unwrap_model(prepared, keep_fp32_wrapper=False) is model
        return losses

    try:
        eager, ours = both(loop)
    finally:
        accelerate.state.AcceleratorState._reset_state(True)
    assert eager == ours


def test_data_parallel_without_devices_is_the_module_itself() -> None:
    def loop(model: nn.Module) -> None:
        opt = torch.optim.SGD(trained(model), lr=0.1)
        wrapped = nn.DataParallel(model)
        step(wrapped, *batches(1)[0])
        opt.step()

    both(loop)


# -- the Trainer of transformers


def language_model() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=1, pad_token_id=2
    )
    model = transformers.GPT2LMHeadModel(config)
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, lora_dropout=0.1, task_type="CAUSAL_LM", target_modules=["c_attn"]))


def full_model() -> nn.Module:
    return language_model().unload().requires_grad_(True)  # GPT-2 with everything trainable


def texts() -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(2)
    tokens = torch.randint(3, 64, (16, 12), generator=g)
    return [{"input_ids": t, "labels": t} for t in tokens]


@pytest.fixture
def quiet() -> Iterator[None]:
    transformers.utils.logging.set_verbosity_error()
    yield
    accelerate.state.AcceleratorState._reset_state(True)


def trainer(model: nn.Module, folder: Path, optimizer: Any = None, steps: int = 6, **options: Any) -> Any:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        max_steps=steps,
        save_steps=3,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **options,
    )
    scheduler = None
    if optimizer is not None:
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))
    return transformers.Trainer(model, arguments, train_dataset=texts(), optimizers=(optimizer, scheduler))


def losses(run: Any) -> list[float]:
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
def test_trainer_with_adapprox_resumes(kind: str, tmp_path: Path) -> None:
    make = language_model if kind == "lora" else full_model
    example = {k: v[None].expand(2, -1) for k, v in texts()[0].items()}
    finals = {}
    for name in ("eager", "ours"):
        model = make()
        if name == "ours":
            eager_keys = list(model.state_dict())
            model = fxmem.optimize(model, (), example)
            assert list(model.state_dict()) == eager_keys
        run = trainer(model, tmp_path / name, adapprox(model))
        run.train()
        finals[name] = losses(run), {n: p.detach().clone() for n, p in model.named_parameters()}
    assert finals["eager"][0] == finals["ours"][0]
    assert same(finals["eager"][1], finals["ours"][1])
    # Interrupted after the third step, and gone on with in a fresh process's stead.
    model = fxmem.optimize(make(), (), example)
    run = trainer(model, tmp_path / "ours", adapprox(model))
    run.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-3"))
    assert losses(run)[3:] == finals["ours"][0][3:]
    assert same({n: p.detach() for n, p in model.named_parameters()}, finals["ours"][1])
    # What it saved is what the class itself loads.
    run.save_model(str(tmp_path / "saved"))
    if kind == "lora":
        loaded = peft.PeftModel.from_pretrained(language_model().unload(), str(tmp_path / "saved"))
    else:
        loaded = type(model).from_pretrained(str(tmp_path / "saved"))
    model.eval()
    loaded.eval()
    ids = example["input_ids"]
    assert same(model(input_ids=ids).logits, loaded(input_ids=ids).logits)


def adapprox(model: nn.Module) -> fxmem.Adapprox:
    return fxmem.Adapprox(trained(model), lr=1e-2, weight_decay=0.01)


@pytest.mark.usefixtures("quiet")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
def test_trainer_with_checkpointing_accumulation_and_bf16(tmp_path: Path) -> None:
    example = {k: v[None].expand(2, -1) for k, v in texts()[0].items()}
    finals = []
    for wrap in (lambda m: m, lambda m: fxmem.optimize(m, (), example)):
        model = wrap(language_model())
        run = trainer(
            model, tmp_path, steps=3, gradient_checkpointing=True, gradient_accumulation_steps=2, bf16=True, max_grad_norm=0.5
        )
        run.train()
        finals.append((losses(run), {n: p.detach().clone() for n, p in model.named_parameters()}))
        accelerate.state.AcceleratorState._reset_state(True)
    assert finals[0][0] == finals[1][0]
    assert same(finals[0][1], finals[1][1])
