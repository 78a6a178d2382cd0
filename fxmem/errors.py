"""The fxmem error family: every message names what is wrong, why, and what to do about it."""

from __future__ import annotations


class FxmemError(Exception):
    """Base of every error that fxmem raises on purpose.

    Args:
        reason: what is wrong, as one sentence.
        where: the node, module path, parameter or argument that it is about, or None.
        remedy: what the user can do, as one sentence, or None.
    """

    def __init__(self, reason: str, *, where: str | None = None, remedy: str | None = None) -> None:
        self.reason = reason
        self.where = where
        self.remedy = remedy
        super().__init__(reason, where, remedy)

    def __str__(self) -> str:
        text = f"{self.where}: {self.reason}" if self.where else self.reason
        return f"{text} {self.remedy}" if self.remedy else text

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.reason, self.where, self.remedy))


def _rebuild(cls: type[FxmemError], reason: str, where: str | None, remedy: str | None) -> FxmemError:
    return cls(reason, where=where, remedy=remedy)


class ArgumentError(FxmemError, TypeError):
    """An argument is of the wrong kind or does not fit the model."""


class CaptureError(FxmemError):
    """The model cannot be captured as a graph."""


class RewriteError(FxmemError):
    """A rewritten graph failed its checks; the original model is untouched."""


class OptimizerError(FxmemError, ValueError):
    """An optimizer was given parameters, gradients, options or state that it cannot serve."""
