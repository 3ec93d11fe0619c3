"""Carries letters to nodes in this process, the way Flower does: every letter meets a node that is made anew, and
nothing but bytes passes. Faults can be laid in its way."""

import itertools
import json

from fedprior import store
from fedprior.letters import Answer, Letter
from fedprior.node import answered
from fedprior.progress import Silent


def copied(letter):
    """What arrives of a letter."""
    return Letter(
        json.loads(json.dumps(letter.facts)),
        {name: store.tree_from(store.tree_bytes(value)) for name, value in letter.trees.items()},
    )


class LocalPost:
    """`sites` are configurations of nodes, by number. `order` reorders the answers that are collected together;
    `fault(node, kind, letter, answer)` may change an answer, return None to lose it, or raise."""

    def __init__(self, experiment, sites, order=list, fault=None):
        self.experiment, self.order, self.fault = experiment, order, fault
        self.sites = dict(sites)
        self.away = set()
        self.waiting = {}  # letters on their way
        self.log = []  # (node, kind) of every letter that arrived
        self.numbers = map(str, itertools.count())

    def nodes(self):
        return [node for node in self.sites if node not in self.away]

    def send(self, letters, seconds):
        sent = []
        for node, kind, letter in letters:
            number = next(self.numbers)
            self.waiting[number] = node, kind, copied(letter)
            sent.append(number)
        return sent

    def collect(self, numbers):
        return self.order([found for number in list(numbers) if (found := self.deliver(number)) is not None])

    def deliver(self, number):
        if number not in self.waiting or self.waiting[number][0] in self.away:
            return None
        node, kind, letter = self.waiting.pop(number)
        self.log.append((node, kind))
        answer = answered(self.experiment, self.sites[node], kind, letter, Silent())
        if self.fault is not None:
            answer = self.fault(node, kind, letter, answer)
        if answer is None:
            return None
        if isinstance(answer, str):
            return Answer(number, None, answer)
        try:
            return Answer(number, copied(answer))
        except ValueError as error:
            return Answer(number, None, f"its answer is malformed ({error})")
