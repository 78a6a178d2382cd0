"""Models of the ecosystem: transformers, peft, detection, optical flow. The oracle is the untouched model."""

from __future__ import annotations

from typing import Any

import ecosystem
import pytest
import torch
from oracle import compare, compare_runs
from torch import nn

import fxmem
from fxmem.measure import run

# On several threads eager itself differs from run to run: the gradient of an index sums in any order.
pytestmark = pytest.mark.usefixtures("one_thread")


def _needs(*names: str) -> None:
    for name in names:
        pytest.importorskip(name, reason=f"{name} is not installed")


def _check(model: nn.Module, inputs: dict[str, Any]) -> tuple[Any, float]:
    keys = list(model.state_dict())
    optimized: Any = fxmem.optimize(model, (), inputs)
    assert list(optimized.state_dict()) == keys
    eager, ours = compare(model, optimized, (), inputs)
    assert ours.measurement.peak <= eager.measurement.peak
    return optimized, ours.measurement.kept / eager.measurement.kept


@pytest.mark.parametrize("name", ecosystem.TRANSFORMERS)
def test_transformers(name: str) -> None:
    _needs("transformers", "peft")
    model = ecosystem.TRANSFORMERS[name]
    module = model.build().train()
    optimized, _ = _check(module, model.inputs())
    assert type(optimized) is type(module)
    adapted = ecosystem.lora(model.build().train(), model.adapters)
    _, ratio = _check(adapted, model.inputs())
    assert ratio < 0.95


@pytest.mark.parametrize("kind", ["dora", "ia3"])
@pytest.mark.parametrize("name", ["Llama", "T5"])
def test_other_adapters(name: str, kind: str) -> None:
    _needs("transformers", "peft")
    model = ecosystem.TRANSFORMERS[name]
    _check(ecosystem.lora(model.build().train(), model.adapters, kind), model.inputs())


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["GPT-2", "Llama", "BART"])
def test_attention_written_out(name: str, attention: str) -> None:
    _needs("transformers")
    model = ecosystem.TRANSFORMERS[name]
    module: Any = model.build().train()
    module.set_attn_implementation(attention)
    if name == "Llama":
        for layer in module.model.layers:
            layer.self_attn.attention_dropout = 0.2
    optimized, ratio = _check(module, model.inputs())
    if attention == "eager":
        assert ratio < 0.95
        assert any(d.op == "dropout" and d.rewritten and d.source for d in optimized.decisions)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["GPT-2", "Llama"])
@pytest.mark.filterwarnings("ignore")
def test_gradient_checkpointing(name: str, reentrant: bool) -> None:
    _needs("transformers", "peft")
    model = ecosystem.TRANSFORMERS[name]
    adapted: Any = ecosystem.lora(model.build().train(), model.adapters)
    adapted.enable_input_require_grads()
    adapted.gradient_checkpointing_enable({"use_reentrant": reentrant})
    inputs = model.inputs()
    optimized: Any = fxmem.optimize(adapted, (), inputs)
    compare(adapted, optimized, (), inputs)
    # Switched on or off afterwards, too.
    for m in (adapted, optimized):
        m.gradient_checkpointing_disable()
    compare_runs(run(adapted, (), inputs), run(optimized, (), inputs))


def test_what_the_model_can_do_besides() -> None:
    _needs("transformers", "peft")
    model = ecosystem.TRANSFORMERS["Llama"]
    adapted: Any = ecosystem.lora(model.build(), model.adapters).eval()
    inputs = model.inputs()
    optimized: Any = fxmem.optimize(adapted, (), inputs)
    ids = inputs["input_ids"][:, :5]
    options = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(adapted.generate(input_ids=ids, **options), optimized.generate(input_ids=ids, **options))
    assert optimized.config is adapted.config
    for m in (adapted, optimized):
        m.eval()
    plain = {"input_ids": ids, "use_cache": False}
    with torch.no_grad():
        full = adapted(**plain, output_hidden_states=True, output_attentions=False)
        ours = optimized(**plain, output_hidden_states=True, output_attentions=False)
        assert type(ours) is type(full)
        assert len(ours.hidden_states) == len(full.hidden_states)
        assert all(torch.equal(a, b) for a, b in zip(full.hidden_states, ours.hidden_states, strict=True))
        assert torch.equal(full[0], optimized(**plain, return_dict=False)[0])
        with adapted.disable_adapter(), optimized.disable_adapter():
            base = adapted(**plain).logits
            assert torch.equal(base, optimized(**plain).logits)
            assert not torch.equal(base, full.logits)
    optimized.train()
    adapted.train()
    compare_runs(run(adapted, (), inputs), run(optimized, (), inputs))
    optimized.merge_adapter()  # into the weights, which both share
    adapted.base_model.model.load_state_dict(adapted.base_model.model.state_dict())
    merged = optimized.eval()(**plain).logits
    torch.testing.assert_close(merged, full.logits)
    optimized.unmerge_adapter()


def test_train_and_eval_afterwards() -> None:
    _needs("transformers")
    model = ecosystem.TRANSFORMERS["T5"]
    module = model.build().train()
    module.requires_grad_(False)
    module.get_submodule("lm_head").requires_grad_()
    optimized: Any = fxmem.optimize(module, (), model.inputs())
    for training in (False, True):
        module.train(training)
        optimized.train(training)
        compare(module, optimized, (), model.inputs())


def test_without_example_inputs() -> None:
    _needs("transformers", "peft")
    model = ecosystem.TRANSFORMERS["GPT-2"]
    adapted = ecosystem.lora(model.build().train(), model.adapters)
    eager, ours = compare(adapted, fxmem.optimize(adapted), (), model.inputs())
    assert ours.measurement.kept < eager.measurement.kept


def test_recompute_by_export() -> None:
    _needs("transformers", "peft")
    model = ecosystem.TRANSFORMERS["GPT-2"]
    adapted = ecosystem.lora(model.build().train(), model.adapters)
    by_regions: Any = fxmem.optimize(adapted, (), model.inputs(), policy="recompute")
    assert any("capture='export' may give one" in note for note in by_regions.notes)
    exported = fxmem.optimize(adapted, (), model.inputs(), policy="recompute", capture="export")
    eager, ours = compare(adapted, exported, (), model.inputs())
    assert ours.measurement.kept < 0.6 * eager.measurement.kept


def test_report_shows_both_columns() -> None:
    _needs("transformers", "peft")
    model = ecosystem.TRANSFORMERS["BERT"]
    adapted = ecosystem.lora(model.build().train(), model.adapters)
    report = fxmem.report(adapted, (), model.inputs(), measured=True, freezing=1)
    assert report.fxmem is not None
    assert report.measured is not None
    assert report.measured[1] is not None
    assert (report.eager.kept, report.fxmem.kept) == (report.measured[0].kept, report.measured[1].kept)
    assert sum(r.fxmem or 0 for r in report.rows) == report.fxmem.kept < report.eager.kept
    row = next(r for r in report.rows if r.op == "Dropout" and r.rewritten)
    assert row.reason == "dropped: the derivative of dropout needs one bit per element"


VISION = {**ecosystem.DETECTION, **ecosystem.FLOW}


def _last(module: nn.Module) -> None:
    parameters = list(module.requires_grad_(False).parameters())
    for parameter in parameters[-(len(parameters) // 4) :]:
        parameter.requires_grad_()


def test_vision() -> None:
    model = VISION["fasterrcnn_mobilenet_v3_large_320_fpn"]
    module = model.build().train()
    _, ratio = _check(module, model.inputs())
    assert ratio < 1
    _last(module)
    _check(module, model.inputs())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["retinanet_resnet50_fpn", "maskrcnn_resnet50_fpn", "ssdlite320_mobilenet_v3_large", "raft_small"]
)
def test_more_vision(name: str) -> None:
    module = VISION[name].build().train()
    _last(module)
    _check(module, VISION[name].inputs())


def test_detection_in_eval_mode() -> None:
    model = VISION["fasterrcnn_mobilenet_v3_large_320_fpn"]
    module = model.build().eval().requires_grad_(False)
    images = [image.requires_grad_() for image in model.inputs()["images"]]
    optimized: Any = fxmem.optimize(module, (images,))
    expected, got = module(images), optimized(images)
    assert [d.keys() for d in got] == [d.keys() for d in expected]
    assert all(torch.equal(a[k], b[k]) for a, b in zip(expected, got, strict=True) for k in a)
