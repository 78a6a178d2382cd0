"""Which values to keep, and which to make again: one optimisation problem, with one cost.

A value is kept, which takes its bytes until backward, or can be made again of the values that it is computed from, which takes
the work of computing it. Let ``K`` be the set of kept values. A value is at hand in backward if it is in ``K``, or can be made
and all that it is made of is at hand. Every wanted value, one that some derivative reads, must be at hand. A plan costs

    bytes(K) + rate * sum over wanted w of work(w | K),

where ``work(w | K)`` is the work of all that must be made to have ``w`` of what is kept: a value is not held from one wanted
value to another. Work is counted in bytes moved, so ``1 / rate`` says how many bytes may be moved to spare one.

With ``rate = 0`` the minimum is a minimum cut. Split each value in two vertices with an arc whose capacity is its bytes
(unlimited if it cannot be kept); draw unlimited arcs from the values that it is made of to it, or from the source if it cannot
be made; and from each wanted value to the sink. A wanted value is not at hand iff some way back from it, through values that
are not kept, ends at a value that cannot be made, so ``K`` serves iff it cuts all ways from source to sink. (The partitioner of
AOTAutograd builds the same graph.)

With a positive rate the work of a wanted value depends on all of ``K``, and no cut says so. Small problems are solved by
trying everything. For others two plans, the minimum cut and the one that keeps all that is wanted, are improved by keeping one
value more or one less, or one more and others less, for as long as that makes them cheaper; the better of the two is taken.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import networkx as nx


@dataclass(frozen=True)
class Item:
    """One value.

    Args:
        nbytes: what keeping it takes; None if it cannot be kept, 0 if it is alive anyway.
        sources: values before it that it can be made of; None if it cannot be made.
        work: bytes that are moved to make it of them.
    """

    nbytes: int | None
    sources: tuple[int, ...] | None
    work: int = 0


def needed(items: Sequence[Item], kept: Collection[int], wanted: int) -> frozenset[int] | None:
    """The values that are made, itself included, to have ``wanted`` again; None if it cannot be had of what is kept."""
    made: set[int] = set()
    stack = [wanted]
    while stack:
        value = stack.pop()
        if value in made or value in kept:
            continue
        sources = items[value].sources
        if sources is None:
            return None
        made.add(value)
        stack.extend(sources)
    return frozenset(made)


def cost(items: Sequence[Item], wanted: Iterable[int], kept: Collection[int], rate: float) -> float:
    """What a plan costs, infinite if it does not serve.

    Args:
        items: the values, each after those that it is made of.
        wanted: what backward reads.
        kept: the plan.
        rate: bytes kept that a byte moved is worth.
    """
    total = float(sum(items[k].nbytes or 0 for k in kept))
    for value in wanted:
        made = needed(items, kept, value)
        if made is None:
            return float("inf")
        total += rate * sum(items[m].work for m in made)
    return total


def cheapest(items: Sequence[Item], wanted: Collection[int], rate: float, *, small: int = 8) -> frozenset[int]:
    """The values to keep, those that are alive anyway among them.

    Args:
        items: the values, each after those that it is made of.
        wanted: what backward reads; each can be kept or made.
        rate: bytes kept that a byte moved is worth.
        small: number of values up to which everything is tried.
    """
    anyway = frozenset(i for i, item in enumerate(items) if item.nbytes == 0)
    near = _upstream(items, wanted, anyway)
    open_to = [i for i in sorted(near) if items[i].nbytes]
    if len(open_to) <= small:
        return exhaustive(items, wanted, rate)
    starts = [anyway | frozenset(minimum_cut(items, wanted)), anyway | {w for w in wanted if items[w].nbytes is not None}]
    plans = [_Search(items, wanted, start, rate).run() for start in starts if cost(items, wanted, start, 0) < float("inf")]
    return min(plans, key=lambda plan: cost(items, wanted, plan, rate))


def exhaustive(items: Sequence[Item], wanted: Collection[int], rate: float) -> frozenset[int]:
    """The cheapest plan of all, by trying each; for tests and small problems."""
    anyway = frozenset(i for i, item in enumerate(items) if item.nbytes == 0)
    open_to = [i for i in sorted(_upstream(items, wanted, anyway)) if items[i].nbytes]
    plans = (anyway | set(chosen) for n in range(len(open_to) + 1) for chosen in itertools.combinations(open_to, n))
    return min(plans, key=lambda plan: cost(items, wanted, plan, rate))


def _upstream(items: Sequence[Item], wanted: Iterable[int], stop: Collection[int]) -> set[int]:
    seen: set[int] = set()
    stack = list(wanted)
    while stack:
        value = stack.pop()
        if value not in seen:
            seen.add(value)
            if value not in stop:
                stack.extend(items[value].sources or ())
    return seen


def minimum_cut(items: Sequence[Item], wanted: Iterable[int]) -> set[int]:
    """The plan of fewest bytes; of several, the one whose values are nearest to the wanted ones."""
    graph: Any = nx.DiGraph()
    graph.add_nodes_from(("source", "sink"))
    for i in _upstream(items, wanted, ()):
        item = items[i]
        # An arc without capacity has no limit.
        graph.add_edge((i, "in"), (i, "out"), **({} if item.nbytes is None else {"capacity": item.nbytes}))
        if item.sources is None:
            graph.add_edge("source", (i, "in"))
        for source in item.sources or ():
            graph.add_edge((source, "out"), (i, "in"))
    for value in wanted:
        graph.add_edge((value, "out"), "sink")
    # networkx puts on the sink's side just what can still reach it: the cut nearest to what is wanted.
    _, (near_source, _) = nx.minimum_cut(graph, "source", "sink")
    return {i for i, side in near_source - {"source"} if side == "in" and (i, "out") not in near_source}


class _Search:
    """Improves a plan step by step."""

    def __init__(self, items: Sequence[Item], wanted: Collection[int], start: Iterable[int], rate: float) -> None:
        self.items, self.rate = items, rate
        self.kept = set(start)
        self.made = {w: self._needed(w) for w in wanted}
        self.users: dict[int, set[int]] = {}
        for w, made in self.made.items():
            self._use(w, made)

    def run(self) -> frozenset[int]:
        improved = True
        while improved:
            improved = False
            for value in sorted({*self.users, *self.kept}):
                if self.items[value].nbytes:
                    improved |= self._drop(value) if value in self.kept else self._add(value)
        return frozenset(self.kept)

    def _add(self, value: int) -> bool:
        """Keeps ``value``, and lets go what that makes superfluous, if both together are worth it."""
        before, undo = self._total(), []
        self._set(value, True)
        undo.append(value)
        gain = before - self._total()
        for other in self._boundary(value):
            if self.items[other].nbytes and other in self.kept and self._drop(other, give=max(0.0, -gain)):
                undo.append(other)
                gain = before - self._total()
        if gain > 1e-9:
            return True
        for changed in reversed(undo):
            self._set(changed, changed not in self.kept)
        return False

    def _drop(self, value: int, give: float = 0.0) -> bool:
        if value not in self.kept:
            return False
        before = self._total()
        self._set(value, False)
        if before - self._total() > 1e-9 - give and self._serves():
            return True
        self._set(value, True)
        return False

    def _boundary(self, value: int) -> list[int]:
        """Kept values that ``value`` would be made of, and that it is made into."""
        made = needed(self.items, self.kept - {value}, value)
        sources = {s for m in made or () for s in self.items[m].sources or ()} & self.kept
        return sorted(sources - {value})

    def _needed(self, wanted: int) -> frozenset[int] | None:
        return needed(self.items, self.kept, wanted)

    def _use(self, w: int, made: frozenset[int] | None) -> None:
        for m in made or ():
            self.users.setdefault(m, set()).add(w)
            for s in self.items[m].sources or ():
                self.users.setdefault(s, set()).add(w)
        self.users.setdefault(w, set()).add(w)

    def _set(self, value: int, keep: bool) -> None:
        (self.kept.add if keep else self.kept.discard)(value)
        for w in list(self.users.get(value, ())):
            made = self._needed(w)
            self.made[w] = made
            self._use(w, made)

    def _serves(self) -> bool:
        return all(made is not None for made in self.made.values())

    def _total(self) -> float:
        nbytes = sum(self.items[k].nbytes or 0 for k in self.kept)
        work = sum(self.items[m].work for made in self.made.values() for m in made or ())
        return nbytes + self.rate * work


def selection(items: Sequence[Item], wanted: Collection[int], rate: float) -> tuple[frozenset[int], frozenset[int]]:
    """What to keep and what to make if all that is made is made once, and held until it is used.

    A value is needed (``n``) and perhaps made (``u``), and costs ``bytes * (n - u) + rate * work * u``; ``u`` requires ``n``,
    and the ``n`` of all that it is made of. To choose the ones at least cost under "requires" is a closure problem, which a
    minimum cut solves.

    Args:
        items: the values, each after those that it is made of.
        wanted: what backward reads; each can be kept or made.
        rate: bytes kept that a byte moved is worth.

    Returns:
        What is kept, and what is made.
    """
    near = sorted(_upstream(items, wanted, ()))
    work = {i: round(rate * items[i].work * _SCALE) for i in near}
    # What cannot be kept costs more than everything else together.
    most = 1 + sum(work.values()) + sum((items[i].nbytes or 0) * _SCALE for i in near)
    graph: Any = nx.DiGraph()
    graph.add_nodes_from(("source", "sink"))
    for i in near:
        item = items[i]
        nbytes = most if item.nbytes is None else item.nbytes * _SCALE
        graph.add_edge((i, "n"), "sink", capacity=nbytes)
        if item.sources is None:
            continue
        price = work[i] - nbytes
        if price > 0:
            graph.add_edge((i, "u"), "sink", capacity=price)
        else:
            graph.add_edge("source", (i, "u"), capacity=-price)
        for required in (i, *item.sources):
            graph.add_edge((i, "u"), (required, "n"))
    for i in wanted:
        graph.add_edge("source", (i, "n"))
    _, (chosen, _) = nx.minimum_cut(graph, "source", "sink")
    made = frozenset(i for i in near if (i, "u") in chosen)
    return frozenset(i for i in near if (i, "n") in chosen and i not in made), made


_SCALE = 64
