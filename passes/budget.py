"""Budget: what else to make again so that the peak fits, at the least extra work.

Where recipes of cheap ops are not enough, whole stretches of the graph are made again, matrix products, convolutions and
attention among them. A stretch lies between two *joints*: values that all that comes later is made of, such as the residual
stream between two blocks. Its end is kept. What else in it is kept, and what is made, is chosen by ``cheapest.selection`` for
bytes at a given rate per work; all that is wanted in it is then made by one recipe when backward comes to it, and held until
it is used, so nothing is made twice.

Which stretches, and at which rate, is decided among plans of one family: stretches of one, two, three or more joints' length;
the first ``j`` of them made again, the others kept as the policy ``"recompute"`` does; a ladder of rates. The first ones,
because what is made at the start of backward lies on top of everything that is kept, and later there is less. A plan's extra
work is known, and its peak is estimated:

    max over values, last to first, of what is kept up to there + gradients of parameters after + gradients at the place + what
    its stretch holds,

plus what that leaves out (the kernels' own memory), taken from the exact predictions so far. Plans without stretches come
first, from one that makes nothing again to that of ``"recompute"``. Of those whose estimate fits, the one of least work is
built and its peak predicted on fake tensors (``lifetimes``); one that does not fit makes way for one that keeps less by enough.

Requires what ``recompute`` does. Ensures that the predicted peak fits, or says how far it could go.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from fxmem.errors import ArgumentError
from fxmem.passes.base import attribute, tensors_of
from fxmem.passes.cheapest import Item, cheapest, needed, selection
from fxmem.passes.fakes import Fakes
from fxmem.passes.lifetimes import follow
from fxmem.passes.recompute import RATE, RECIPES, Batch, Rewrite, Watch, look
from fxmem.records import Decision

_RATES = (1 / 64, 1 / 128, 1 / 256, 1 / 512, 0.0)
_MOST_TRIES, _LAST_TRIES = 24, 4


@dataclass(frozen=True)
class Plan:
    """One member of the family.

    Args:
        kept: the values to keep.
        stretches: first and last position of each stretch that is made again.
        work: bytes moved in backward to make values.
        estimate: of the peak, up to a constant.
        nbytes: of what is kept.
    """

    kept: frozenset[int]
    stretches: tuple[tuple[int, int], ...]
    work: int
    estimate: int
    nbytes: int


@dataclass(frozen=True)
class Outcome:
    """A plan, built.

    Args:
        graph: the rewritten graph.
        recipes: the modules that it takes recipes from.
        decisions: one for each value that is not kept any more.
        peak: predicted, in bytes.
        extra: its work as a part of that of forward and backward.
    """

    graph: fx.Graph
    recipes: nn.Module | None
    decisions: list[Decision]
    peak: int
    extra: float


def fit(
    gm: Any,
    graph: fx.Graph,
    inputs: Mapping[str, Any],
    fakes: Callable[[], Fakes | None],
    budget: int,
    call: tuple[tuple[Any, ...], Mapping[str, Any]],
) -> Outcome:
    """The plan of least work whose predicted peak is within the budget.

    Args:
        gm: the module; its graph and recipes are changed while plans are tried.
        graph: the graph to rewrite; it is left as it is, but for calls that are put out of place.
        inputs: by placeholder name, real or fake.
        fakes: makes what the graph runs on.
        budget: most bytes alive at once over forward and backward, as ``measure`` counts them.
        call: the inputs as the module is called with them.

    Raises:
        ArgumentError: no plan fits; names the smallest peak found.
    """
    watch = look(gm, graph, inputs, fakes)
    tries = _Tries(gm, graph, watch, call, fakes)
    for rate in (1.0, 1 / 8, 1 / 16, 1 / 32, RATE):
        first = tries.build(rate)
        if first.peak <= budget:
            return first
    family = _Family(Rewrite(gm, graph, watch), Rewrite(gm, graph, watch, heavy=True))
    smallest = first.peak
    plans = sorted(family.plans(), key=lambda p: (p.work, p.estimate))
    offset = first.peak - family.start.estimate
    left = plans
    for _ in range(_MOST_TRIES):
        left = [p for p in left if p.estimate + offset <= budget]
        if not left:
            break
        plan = left[0]
        outcome = tries.build(plan)
        if outcome.peak <= budget:
            return outcome
        smallest = min(smallest, outcome.peak)
        offset = min(offset, outcome.peak - plan.estimate)
        # The next one is to make up for half of what is missing, by one account or the other.
        enough = (outcome.peak - budget) // 2
        left = [p for p in left if p.estimate < plan.estimate - enough or p.nbytes < plan.nbytes - enough]
    for plan in sorted(plans, key=lambda p: (p.estimate, p.nbytes))[:_LAST_TRIES]:
        outcome = tries.build(plan)
        if outcome.peak <= budget:
            return outcome
        smallest = min(smallest, outcome.peak)
    raise ArgumentError(
        f"{budget} bytes cannot be met: the smallest peak that was found is {smallest} bytes.",
        where="budget",
        remedy=f"Pass {smallest} or more, freeze parameters, or take a smaller batch.",
    )


class _Tries:
    """Builds plans on copies of the graph, and predicts their peaks."""

    def __init__(
        self,
        gm: Any,
        graph: fx.Graph,
        watch: Watch,
        call: tuple[tuple[Any, ...], Mapping[str, Any]],
        fakes: Callable[[], Fakes | None],
    ) -> None:
        self.gm, self.graph, self.watch, self.call, self.fakes = gm, graph, watch, call, fakes
        # Backward does about twice the work of forward.
        self.all = 3 * sum(v.moved + v.flops // 8 for v in watch.values.values())

    def build(self, plan: Plan | float) -> Outcome:
        """One plan; a number stands for that of the policy ``"recompute"`` at this rate."""
        graph, watch = _twin(self.graph, self.watch)
        self.gm._modules.pop(RECIPES, None)
        rewrite = Rewrite(self.gm, graph, watch, heavy=isinstance(plan, Plan))
        if not isinstance(plan, Plan):
            kept = cheapest(rewrite.items, sorted(rewrite.demands), plan)
            batches = rewrite.separately(kept)
        else:
            batches = _batches(rewrite, plan)
        decisions = rewrite.apply(batches)
        self.gm.graph = graph
        work = sum(rewrite.items[m].work for batch in batches for m in batch.made)
        peak = self._peak()
        return Outcome(graph, self.gm._modules.get(RECIPES), decisions, peak, work / max(self.all, 1))

    def _peak(self) -> int:
        given = (*tensors_of(self.call), *self.gm.parameters(), *self.gm.buffers())
        with torch.enable_grad():
            peak = follow(self.gm, *self.call, self.fakes() or Fakes(given)).footprint.peak
        assert peak is not None, "what keeps something for backward has a backward"
        return peak


def _twin(graph: fx.Graph, watch: Watch) -> tuple[fx.Graph, Watch]:
    """A copy of a graph, and what was seen of it in terms of the copy."""
    twin = copy.deepcopy(graph)
    new = dict(zip(graph.nodes, twin.nodes, strict=True))
    seen = copy.copy(watch)
    seen.values = {new[n]: replace(v, node=new[n], operands=tuple(new[o] for o in v.operands)) for n, v in watch.values.items()}
    return twin, seen


def _batches(rewrite: Rewrite, plan: Plan) -> list[Batch]:
    """Recipes of a plan: one for each stretch that is made again, one for each wanted value elsewhere."""
    inside: dict[int, list[int]] = {}
    for i in rewrite.demands:
        for number, (low, high) in enumerate(plan.stretches):
            if low <= rewrite.place(i) <= high and i not in plan.kept:
                inside.setdefault(number, []).append(i)
    batches = []
    for wanted in inside.values():
        made: set[int] = set()
        for i in wanted:
            found = needed(rewrite.items, plan.kept, i)
            assert found is not None
            made |= found
        batches.append(Batch(tuple(sorted(made)), tuple(sorted(wanted))))
    alone = {i for wanted in inside.values() for i in wanted}
    return [*batches, *rewrite.separately(plan.kept | alone)]


class _Family:
    """The plans."""

    def __init__(self, cheap: Rewrite, heavy: Rewrite) -> None:
        self.items, self.wanted = heavy.items, sorted(heavy.demands)
        self.cheap_items = cheap.items
        self.cheap = cheapest(cheap.items, sorted(cheap.demands), RATE)
        self.joints = _joints(heavy)
        self.place = [heavy.place(i) for i in range(len(self.items))]
        self.free = frozenset(i for i, item in enumerate(self.items) if item.nbytes == 0)
        self.besides = _besides(heavy)
        self.start = self._plan((), frozenset(), 0)

    def plans(self) -> Iterator[Plan]:
        """All of them but the first, which has no stretches."""
        length = 1
        while length <= len(self.joints):
            ends = self.joints[length - 1 :: length]
            lows = [0, *(end + 1 for end in ends[:-1])]
            stretches = [s for s in zip(lows, ends, strict=True) if any(s[0] <= w < s[1] for w in self.wanted)]
            for rate in _RATES:
                kept: frozenset[int] = frozenset()
                held = 0
                done: list[tuple[int, int]] = []
                for low, high in stretches:
                    chosen, in_it = self._stretch(low, high, rate)
                    kept |= chosen
                    held = max(held, in_it)
                    done.append((low, high))
                    yield self._plan(tuple(done), kept, held)
            length += 1 if length < 4 else length // 2

    def _stretch(self, low: int, high: int, rate: float) -> tuple[frozenset[int], int]:
        """What to keep of one stretch, and the bytes of what is made in it and held."""
        local: list[Item] = []
        for i, item in enumerate(self.items):
            inside = low <= self.place[i] < high or (i != high and self.place[i] == high)
            local.append(item if inside or item.nbytes is None else Item(item.nbytes, None))
        wanted = [w for w in self.wanted if low <= self.place[w] <= high]
        kept, made = selection(local, {*wanted, high}, rate)
        held = sum(self.items[w].nbytes or 0 for w in wanted if w in made)
        return kept, held

    def _plan(self, stretches: tuple[tuple[int, int], ...], chosen: frozenset[int], held: int) -> Plan:
        end = stretches[-1][1] if stretches else -1
        kept = self.free | chosen | {k for k in self.cheap if self.place[k] > end}
        work = 0
        holds: list[tuple[int, int, int]] = []
        made: set[int] = set()
        for w in self.wanted:
            if w in kept:
                continue
            items = self.items if self.place[w] <= end else self.cheap_items
            found = needed(items, kept, w)
            if found is None:
                kept |= {w}
            elif self.place[w] <= end:
                made |= found
            else:
                work += sum(items[m].work for m in found)
        work += sum(self.items[m].work for m in made)
        for low, high in stretches or ((0, len(self.items) - 1),):
            own = [w for w in self.wanted if stretches and low <= self.place[w] <= high and w not in kept]
            held = sum(self.items[w].nbytes or 0 for w in own)
            holds.append((low, high, held))
        nbytes = sum(self.items[k].nbytes or 0 for k in kept)
        return Plan(kept, stretches, work, self._peak(kept, end, holds), nbytes)

    def _peak(self, kept: frozenset[int], end: int, holds: list[tuple[int, int, int]]) -> int:
        """The most that is alive in backward, from the last value to the first."""
        below = 0
        at: list[int] = []
        made: dict[int, int] = {}
        for k in kept:
            made[self.place[k]] = made.get(self.place[k], 0) + (self.items[k].nbytes or 0)
        for i, besides in enumerate(self.besides):
            below += made.get(i, 0)
            at.append(below + besides)
        return max([*at[end + 1 :], *(max(at[low : high + 1]) + held for low, high, held in holds)], default=0)


def _besides(rewrite: Rewrite) -> list[int]:
    """For each position, what is alive when backward comes there whatever the plan is.

    That is the gradients of parameters that were made before, what calls up to there keep that is nobody's value, and the
    gradients of what the call reads and returns.
    """
    seen: set[int] = set()
    total = 0
    found = []
    private = 0
    before: list[int] = []
    for node in rewrite.nodes:
        own = {s: size for (s, _), size in zip(rewrite.values[node].kept, rewrite.values[node].sizes, strict=True)}
        private += sum(n for s, n in own.items() if s not in rewrite.writers and s not in rewrite.outside)
        before.append(private + rewrite.values[node].moved * (node.op != "output"))
    for node in reversed(rewrite.nodes):
        tensors: list[Any] = []
        if node.op == "call_module":
            tensors = list(rewrite.gm.get_submodule(str(node.target)).parameters())
        elif node.op == "get_attr":
            tensors = [attribute(rewrite.gm, str(node.target))]
        for t in tensors:
            if isinstance(t, torch.Tensor) and t.requires_grad and id(t) not in seen:
                seen.add(id(t))
                total += t.numel() * t.element_size()
        found.append(total)
    return [a + b for a, b in zip(before, reversed(found), strict=True)]


def _joints(rewrite: Rewrite) -> list[int]:
    """Values that all that comes later is made of, besides parameters and the like."""
    last: dict[int, int] = {}
    owners: dict[int, int] = {}
    for i, node in enumerate(rewrite.nodes):
        value = rewrite.values[node]
        for a in value.operands:
            for storage in rewrite.values[a].storages:
                if storage in owners:
                    last[owners[storage]] = max(last.get(owners[storage], 0), i)
        if node.op not in ("placeholder", "get_attr"):
            owners |= dict.fromkeys(value.created | value.changed, i)
    joints: list[int] = []
    reach = 0
    ends = sorted(last.items())
    position = 0
    for i in range(len(rewrite.nodes)):
        while position < len(ends) and ends[position][0] < i:
            reach = max(reach, ends[position][1])
            position += 1
        if reach <= i and rewrite.items[i].nbytes and last.get(i, 0) > i:
            joints.append(i)
    return joints
