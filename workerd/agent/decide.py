# SPDX-License-Identifier: Apache-2.0
"""What the agent does next, as a pure function of what etcd says and of what is here.

It is level-triggered: it never looks at what has changed, only at what is. So a missed event, an
event seen twice and a restart do no harm; the same values always give the same actions, and once
those are carried out and their effects are in the values, it gives none.

What it holds to, whatever the values are (``tests/property/agent`` checks it):

- At most one trainer is ever placed for one (job, slot, local rank, since); a trainer is placed
  once, and ended when the slot means another one.
- A generation is acknowledged when every local rank has stopped for it by its own word, never
  from a page; an ack that is there is not replaced.
- RESTORE is passed on only to a trainer that the slot names, that has stopped for this
  generation, and whose stop this node has acknowledged.
- A node that is dead, or has lost its place, ends the trainers that had it.
- Progress is written at most once an interval, unless a rank's situation has changed.
"""

from __future__ import annotations

from dataclasses import replace

from workerd.agent.actions import Action, EndTrainer, PlaceTrainer
from workerd.agent.processes import processes
from workerd.agent.reports import report
from workerd.agent.standing import standing
from workerd.agent.state import Limits, Local, Orders
from workerd.agent.steering import steer


def decide(orders: Orders | None, local: Local, limits: Limits | None = None) -> tuple[Action, ...]:
    """The actions that are due, in the order in which they are to be carried out.

    ``orders`` is None until etcd has been read for the first time.
    """
    limits = limits or Limits()
    state = standing(orders, local)
    first = tuple(processes(orders, local, state, limits))
    ended = frozenset(one.instance for one in first if isinstance(one, EndTrainer))
    placed = {one.instance: one.placement for one in first if isinstance(one, PlaceTrainer)}
    if placed:
        trainers = tuple(
            replace(one, placement=placed.get(one.instance, one.placement))
            for one in local.trainers
        )
        local = replace(local, trainers=trainers)
    return (*first, *steer(orders, local, state, ended), *report(orders, local, state, limits))
