# SPDX-License-Identifier: Apache-2.0
"""A trainer's part in a recovery, as pure decisions over frozen values.

The SDK acts on these verdicts and on nothing else, so that whatever checks the protocol can run
exactly what runs in production. Every verdict carries the next standing and the reason. A step
that nothing disturbs needs none: see `undisturbed`.

What must hold of a standing, whatever comes in:
- `stopped` only rises, and an update is entered only while no stop is newer than the joined group,
  or by the RESTORE of exactly the newest stop;
- nothing but that RESTORE changes phase or step once Stopped has been sent for a generation;
- a whole state is never rolled back and never overwritten: only an EMPTY rank pulls;
- once all ranks have agreed to stop after a step, none begins another one in that generation.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from workerd.protocol.page import StepPhase


class Do(enum.Enum):
    """What a verdict tells the caller to do."""

    GO = "go"  # allowed, done
    WAIT = "wait"  # not yet: ask again when the standing has changed
    IGNORE = "ignore"  # stale or repeated: nothing to do
    REFUSE = "refuse"  # this process cannot take part any more: it ends itself
    REPEAT = "repeat"  # it holds the state to resume from: drop what the attempt has changed
    ROLL_FORWARD = "roll forward"  # apply the update that is prepared
    ADOPT = "adopt"  # the script's own initial state is the job's
    PULL = "pull"  # fetch the state from a source


class Standing(NamedTuple):
    """Where one trainer stands. Generations are 0 where there has been none yet."""

    phase: StepPhase = StepPhase.EMPTY
    step: int = -1  # -1 while EMPTY
    ready: bool = False  # has come to a waiting point: all that it tracks is known
    pristine: bool = True  # EMPTY, with the script's initial state untouched
    torn: bool = False  # an update raised: part of the state is old and part is new
    joined: int = 0  # the newest generation whose group it has joined
    stopped: int = 0  # the newest generation that it has been told to stop for
    answered: int = 0  # the newest generation that it has sent Stopped for
    restored: int = 0  # the newest generation whose RESTORE it follows
    resume_step: int = -1  # of that RESTORE
    held: int = 0  # the newest generation whose ranks have agreed to stop after a step


class Verdict(NamedTuple):
    """What to do, the standing afterwards (the same one where nothing changes), and why."""

    do: Do
    standing: Standing
    reason: str


def ready(standing: Standing) -> Verdict:
    """The script has come to a waiting point: everything that needs no group is built."""
    return Verdict(Do.GO, standing._replace(ready=True), "all that is tracked is known")


def dirty(standing: Standing) -> Verdict:
    """A rehearsal has run: whatever is in memory now is no initial state of the job."""
    return Verdict(Do.GO, standing._replace(pristine=False), "a rehearsal has changed the state")


def on_stop(standing: Standing, generation: int) -> Verdict:
    """A Stop has come in. GO: abandon the group and all older streams, then ask `may_answer`."""
    if standing.torn:
        return Verdict(Do.IGNORE, standing, "the state is torn: this process ends")
    if generation <= standing.stopped:
        return Verdict(Do.IGNORE, standing, f"already stopped for generation {standing.stopped}")
    return Verdict(
        Do.GO, standing._replace(stopped=generation), f"stopped for generation {generation}"
    )


def may_answer(standing: Standing) -> Verdict:
    """GO: Stopped is sent now, with exactly the standing's phase and step."""
    if standing.torn:
        return Verdict(Do.IGNORE, standing, "a torn state is acknowledged to nobody")
    if standing.answered >= standing.stopped:
        return Verdict(Do.IGNORE, standing, "every stop has been answered")
    if not standing.ready:
        return Verdict(Do.WAIT, standing, "the script has not come to a waiting point yet")
    if standing.phase is StepPhase.UPDATING:
        return Verdict(Do.WAIT, standing, "an update has begun and must end first")
    return Verdict(
        Do.GO,
        standing._replace(answered=standing.stopped),
        f"{standing.phase.name}({standing.step}) is final until the RESTORE",
    )


def on_restore(
    standing: Standing, generation: int, resume_step: int, initial: bool, same_initial: bool
) -> Verdict:
    """A RESTORE has come in: how this rank comes to hold state `resume_step`.

    `initial`: the job has never run and its step 0 is the scripts' own state; `same_initial`: this
    rank's own initial state has the source's digest.
    """
    if standing.torn:
        return Verdict(Do.IGNORE, standing, "the state is torn: this process ends")
    if generation < standing.stopped:
        return Verdict(Do.IGNORE, standing, f"superseded by the stop for {standing.stopped}")
    if generation <= standing.restored:
        return Verdict(Do.IGNORE, standing, f"generation {generation} is followed already")
    if generation != standing.answered:
        return Verdict(Do.REFUSE, standing, f"RESTORE {generation}, but no Stopped was sent for it")
    follow = standing._replace(restored=generation, resume_step=resume_step)
    if standing.phase is StepPhase.EMPTY:
        if initial and standing.pristine and same_initial:
            whole = follow._replace(phase=StepPhase.COMPUTING, step=resume_step, pristine=False)
            return Verdict(Do.ADOPT, whole, "its own initial state is the job's")
        return Verdict(Do.PULL, follow, "it holds no state of the job")
    if standing.step == resume_step:
        if standing.phase is StepPhase.DONE:
            return Verdict(Do.REPEAT, follow, f"it has finished with state {resume_step}")
        return Verdict(
            Do.REPEAT,
            follow._replace(phase=StepPhase.COMPUTING),
            f"nobody has moved on: step {resume_step} is computed again",
        )
    if standing.phase is StepPhase.PREPARED and standing.step == resume_step - 1:
        return Verdict(
            Do.ROLL_FORWARD, follow, f"somebody has state {resume_step}: so was all prepared here"
        )
    return Verdict(
        Do.REFUSE,
        standing,
        f"it holds state {standing.step} in {standing.phase.name}, the job resumes at "
        f"{resume_step}: a whole state is never rolled back nor overwritten",
    )


def may_begin(standing: Standing) -> Verdict:
    """GO: an attempt may start. WAIT: a RESTORE must be followed, or a group joined, first."""
    if standing.joined == 0:
        return Verdict(Do.WAIT, standing, "no group has been joined yet")
    if standing.stopped > standing.joined:
        return Verdict(Do.WAIT, standing, f"stopped for generation {standing.stopped}")
    if standing.held == standing.joined:
        return Verdict(Do.WAIT, standing, f"generation {standing.held} ends at this boundary")
    if standing.phase is not StepPhase.COMPUTING:
        return Verdict(Do.REFUSE, standing, f"no attempt starts in {standing.phase.name}")
    return Verdict(Do.GO, standing, "the group stands")


def prepare(standing: Standing) -> Verdict:
    """The gradients are whole. GO: PREPARED, and the agreement may be entered."""
    if standing.stopped > standing.joined:
        return Verdict(Do.WAIT, standing, f"stopped for generation {standing.stopped}")
    if standing.phase is not StepPhase.COMPUTING:
        return Verdict(Do.REFUSE, standing, f"nothing is prepared in {standing.phase.name}")
    return Verdict(
        Do.GO, standing._replace(phase=StepPhase.PREPARED), "the gradients are whole here"
    )


def may_update(standing: Standing, agreed: bool, stop_after: bool = False) -> Verdict:
    """GO: UPDATING. REPEAT: the attempt is dropped. WAIT: for the RESTORE.

    `agreed`: the agreement of the joined group has ended without an error. `stop_after`: a rank has
    asked in it for a stop after this step, for a planned change; every rank sees the same.
    """
    if standing.stopped > standing.joined:
        if standing.restored < standing.stopped:
            return Verdict(Do.WAIT, standing, f"stopped for generation {standing.stopped}")
        if standing.phase is StepPhase.PREPARED and standing.resume_step == standing.step + 1:
            return Verdict(
                Do.GO,
                standing._replace(phase=StepPhase.UPDATING),
                f"generation {standing.restored} resumes at {standing.resume_step}",
            )
        return Verdict(Do.REPEAT, standing, f"the job resumes at {standing.resume_step}")
    if standing.phase is not StepPhase.PREPARED:
        return Verdict(Do.REFUSE, standing, f"no update starts in {standing.phase.name}")
    if not agreed:
        return Verdict(Do.WAIT, standing, "the group is broken: a stop must come")
    held = standing.joined if stop_after else standing.held
    return Verdict(
        Do.GO,
        standing._replace(phase=StepPhase.UPDATING, held=held),
        "every rank of the job is prepared",
    )


def updated(standing: Standing) -> Verdict:
    """The last byte of an update is written."""
    if standing.phase is not StepPhase.UPDATING:
        return Verdict(Do.REFUSE, standing, f"no update ends in {standing.phase.name}")
    whole = standing._replace(phase=StepPhase.COMPUTING, step=standing.step + 1)
    return Verdict(Do.GO, whole, "the state is whole")


def undisturbed(standing: Standing) -> bool:
    """Whether an attempt may start here, and all goes by itself as long as nothing comes in.

    Then `prepare`, `may_update` (agreed) and `updated` answer GO in turn, at this step and at every
    later one, and change nothing but phase and step: COMPUTING, PREPARED, UPDATING, COMPUTING the
    next step. Who knows that the rest is still what it was need not ask them.
    """
    return (
        0 < standing.joined >= standing.stopped
        and standing.held != standing.joined
        and standing.phase is StepPhase.COMPUTING
    )


def at_boundary(standing: Standing) -> bool:
    """Whether all ranks have agreed to stop before this step: nothing of it has begun anywhere."""
    return 0 < standing.held == standing.joined and standing.phase is StepPhase.COMPUTING


def tear(standing: Standing) -> Verdict:
    """An update has raised: the process serves nobody and ends."""
    return Verdict(Do.REFUSE, standing._replace(torn=True), "the update raised: a torn state")


def pulling(standing: Standing, generation: int) -> Verdict:
    """GO: arriving bytes may overwrite what is in memory."""
    if standing.phase is not StepPhase.EMPTY:
        return Verdict(Do.REFUSE, standing, "a whole state is never overwritten")
    if standing.stopped != generation:
        return Verdict(Do.IGNORE, standing, f"superseded by the stop for {standing.stopped}")
    return Verdict(Do.GO, standing._replace(pristine=False), "memory is being overwritten")


def pulled(standing: Standing, generation: int) -> Verdict:
    """A pull for `generation` has arrived whole and verified. GO: the rank holds the state."""
    if standing.phase is not StepPhase.EMPTY:
        return Verdict(Do.REFUSE, standing, "a whole state is never overwritten")
    if standing.stopped != generation or standing.restored != generation:
        return Verdict(
            Do.IGNORE, standing, f"EMPTY was acknowledged for {standing.stopped} meanwhile"
        )
    whole = standing._replace(phase=StepPhase.COMPUTING, step=standing.resume_step)
    return Verdict(Do.GO, whole, f"state {whole.step} has arrived")


def holds(standing: Standing, generation: int) -> Verdict:
    """GO: this rank holds state S of `generation` and goes on to join (Restored is sent)."""
    if standing.stopped != generation or standing.restored != generation:
        return Verdict(Do.IGNORE, standing, f"superseded by the stop for {standing.stopped}")
    whole = standing.phase in (StepPhase.COMPUTING, StepPhase.DONE)
    if standing.torn or not whole or standing.step != standing.resume_step:
        return Verdict(
            Do.WAIT,
            standing,
            f"{standing.phase.name}({standing.step}) is not state {standing.resume_step}",
        )
    return Verdict(Do.GO, standing, f"holds state {standing.step}")


def may_serve(standing: Standing, generation: int, step: int) -> Verdict:
    """GO: the state may be read by others. WAIT: not yet. REFUSE: not this one, or no more."""
    if standing.torn or standing.stopped != generation or standing.joined >= generation:
        return Verdict(Do.REFUSE, standing, f"not stopped in generation {generation}")
    held = holds(standing, generation)
    if held.do is Do.GO and standing.step != step:
        return Verdict(Do.REFUSE, standing, f"generation {generation} resumes elsewhere")
    return Verdict(Do.GO if held.do is Do.GO else Do.WAIT, standing, held.reason)


def joined(standing: Standing, generation: int) -> Verdict:
    """The group of `generation` is built. GO: it is this rank's group."""
    held = holds(standing, generation)
    if held.do is not Do.GO:
        return Verdict(Do.IGNORE, standing, held.reason)
    return Verdict(Do.GO, standing._replace(joined=generation), f"joined {generation}")


def finish(standing: Standing) -> Verdict:
    """The script has ended. GO: DONE. WAIT: a RESTORE must be followed first."""
    if standing.stopped > standing.joined or standing.joined == 0:
        return Verdict(Do.WAIT, standing, f"stopped for generation {standing.stopped}")
    if standing.held == standing.joined:
        return Verdict(Do.WAIT, standing, f"generation {standing.held} ends at this boundary")
    if standing.phase is not StepPhase.COMPUTING:
        return Verdict(Do.REFUSE, standing, f"nothing is finished in {standing.phase.name}")
    return Verdict(Do.GO, standing._replace(phase=StepPhase.DONE), "the script has ended")
