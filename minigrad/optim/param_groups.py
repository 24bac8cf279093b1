"""Groups of parameters, each with a rule of its own, in one optimizer.

    lr = warmup_cosine(3e-4, num_steps=1000)
    rule = Groups(
        AdamW(lr),                                                  # of all that is in no group
        Group(model.head.parameters(), AdamW(scaled(lr, 10))),
        Group(lambda p: p.name.startswith("embed."), AdamW(scaled(lr, 0.1), weight_decay=0.0)),
    )
    optimizer = Optimizer(model.parameters(), rule)                 # or ddp.optimizer(rule), shards included

To an optimizer parameters are memory, and a rule says which part of it is whose: groups are one more rule that divides
it, as Muon is, so that every layout and every checkpoint has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby

from minigrad.flat_range import FlatRange
from minigrad.optim.update_rules import DividingRule, LearningRate, Rule
from minigrad.parameter import Parameter


class Group:
    """Some parameters, and their rule.

    Args:
        params: themselves, or a function that says of each parameter whether it is one: of a pipeline's stages, which
            have only their own, a name tells.
        rule: SGD, AdamW, Muon or your own `Rule`.
    """

    def __init__(self, params: Callable[[Parameter], bool] | Iterable[Parameter], rule: Rule) -> None:
        self.listed = frozenset[Parameter]() if callable(params) else frozenset(params)
        self.has = params if callable(params) else self.listed.__contains__
        self.rule = rule


class Groups(DividingRule):
    """A rule for each group of parameters, and one for all others.

    A group's learning rate and weight decay are those of its rule; which parameters decay at all is the optimizer's
    `decays` in every group.

    Args:
        others: the rule of what is in no group; the optimizer's `lr` is its learning rate.
    Raises:
        TypeError: a group is none.
    """

    def __init__(self, others: Rule, *groups: Group) -> None:
        for group in groups:
            if not isinstance(group, Group):
                raise TypeError(f"Groups takes a rule and then Group(params, rule) each, got {type(group).__name__}")
        self.others = others
        self.groups = groups

    @property
    def lr(self) -> LearningRate:
        return self.others.lr

    def check(self, params: Sequence[Parameter]) -> None:
        """Check that no parameter is in two groups.

        The optimizer must have each that a group lists.

        Raises:
            ValueError: names the parameter.
        """
        known = set(params)
        for number, group in enumerate(self.groups):
            stray = next((p for p in group.listed if p not in known), None)
            if stray is not None:
                raise ValueError(f"group {number} lists {stray.label}, which this optimizer does not have")
        for p in params:
            numbers = [number for number, group in enumerate(self.groups) if group.has(p)]
            if len(numbers) > 1:
                raise ValueError(f"a parameter must be in one group, {p.label} is in groups {numbers}")
        for rule in self._rules():
            if isinstance(rule, DividingRule):
                rule.check([p for p in params if self._rule_of(p) is rule])

    def divide(self, part: FlatRange) -> Iterator[tuple[FlatRange, Rule]]:
        """Cut a range of memory where another group begins."""
        for rule, run in groupby(part.params, self._rule_of):
            params = tuple(run)
            start, stop = max(params[0].start, part.start), min(params[-1].stop, part.stop)
            yield FlatRange(part.flat, start, stop, params), rule

    def _rule_of(self, p: Parameter) -> Rule:
        return next((group.rule for group in self.groups if group.has(p)), self.others)

    def _rules(self) -> list[Rule]:
        return [self.others, *(group.rule for group in self.groups)]
