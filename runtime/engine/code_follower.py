"""What an engine follows between steps, and the programs that it goes on with after changes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Final

from torch import Tensor, nn

from zeroir.errors import ChangedCodeError, UserError
from zeroir.ir.program import Program
from zeroir.ir.reports import Storing
from zeroir.runtime.engine.live_optimizer import LiveOptimizer
from zeroir.runtime.engine.script_optimizers import ScriptOptimizers, UnknownOptimizers
from zeroir.runtime.engine.signatures import Signatures
from zeroir.runtime.engine.watched_code import WatchedCode, is_current, lent_values, read_tensors
from zeroir.runtime.memory.rank_memory import RankMemory

LOGGER: Final = logging.getLogger("zeroir")

MOST_STATES: Final = 8
"""Programs that one engine compiles for as many states of the user's code."""

StepCounts = Mapping[str, int]
"""The number of the count of steps of each parameter that was not trained in all steps; see ``Earlier``."""

Compile = Callable[[frozenset[str], StepCounts], Signatures]
"""A function that compiles the program again from the present state of the user's code.

Of the numbers with these names every later value is to count, too.
"""

CompileEagerly = Callable[[WatchedCode, StepCounts, Collection[str]], Signatures]
"""A function that compiles a program whose steps call the user's code, from that of the running program.

The last argument names the tensors of the model that the engine has beside those of this program.
"""


class CodeFollower:
    """What an engine follows between steps: the user's code and tensors, and the script's optimizers.

    ``optimizer`` returns the settings of the running program, None where it updates nothing, and ``step_counts`` the
    counts of steps of the parameters that are trained now. ``meet`` waits until all ranks have found a change.
    """

    def __init__(
        self,
        rank: int,
        optimizer: Callable[[], LiveOptimizer | None],
        step_counts: Callable[[Sequence[str]], StepCounts],
        meet: Callable[[str], None],
    ) -> None:
        self._rank = rank
        self._optimizer = optimizer
        self._step_counts = step_counts
        self._meet = meet
        self._code: WatchedCode | None = None
        self._base: WatchedCode | None = None
        self._trained = set[str]()
        self._compile: Compile | None = None
        # One may be known by several states, as those that it follows more or less of.
        self._programs: dict[Hashable, Signatures] = {}
        self._unfollowed: frozenset[str] = frozenset()
        self._keeps = True
        self._eager: CompileEagerly | None = None
        self._optimizers: ScriptOptimizers | None = None
        self._unknown_optimizers: UnknownOptimizers | None = None
        self._lent: Mapping[int, Tensor] = {}

    @property
    def reads_tensors(self) -> bool:
        """Whether the running program has constants whose present values count."""
        return self._code is not None and bool(self._code.tensors)

    @property
    def model(self) -> nn.Module | None:
        """The user's module, where there is one in this process."""
        return None if self._code is None else self._code.model

    def follow(self, code: WatchedCode, base: WatchedCode | None = None) -> None:
        """Follow the code from which the running program was compiled; what was ignored still is.

        Changes are those of ``base``, which is the same on all ranks where they run several programs.
        """
        if self._code is not None:
            code.ignore(self._code.ignored)
        self._code, self._base = code, base or code
        self._trained = set(self._base.trained_names())
        live = self._optimizer()
        of_script = tuple(code.optimizers)
        is_known = self._optimizers is not None and self._optimizers.optimizers == of_script
        if of_script and live is not None and not is_known:
            self.release()
            self._optimizers = ScriptOptimizers(of_script, code.parameter_names(), live)
        if self._unknown_optimizers is None and live is not None and code.model is not None:
            self._unknown_optimizers = UnknownOptimizers(code.parameter_names(), of_script)

    def release(self) -> None:
        """Let the script's optimizers update again."""
        self._unknown_optimizers = None
        if self._optimizers is not None:
            self._optimizers.release()
            self._optimizers = None

    def compile_with(self, compile_again: Compile, present: Signatures | None = None) -> None:
        """Compile after a change instead of refusing it; ``present`` are the programs of the present state.

        Without these no program is kept for a state that comes back.
        """
        self._compile = compile_again
        self._keeps = present is not None
        if present is not None:
            assert self._base is not None
            self._programs = {(self._base.state(), frozenset()): present}

    def compile_eagerly_with(self, compile_eagerly: CompileEagerly) -> None:
        """Let ``compiled_eagerly`` return what this function compiles."""
        self._eager = compile_eagerly

    def remember(self) -> None:
        """Take the running program as compiled from the present state."""
        if self._code is not None:
            self._code.remember()

    def compiled_eagerly(self, others: Collection[str]) -> Signatures:
        """Return a program whose steps call the user's code as it is; ``others`` are as for ``CompileEagerly``.

        Raises:
            UserError: where there is no module in this process whose code it could call.
        """
        if self._eager is None or self._base is None:
            raise UserError(
                "engine.eager() runs the code of a module, and the engine was made from none."
            )
        return self._eager(self._base, self._step_counts(self._base.trained_names()), others)

    def follow_optimizers(self) -> None:
        """Apply the changes of the script's optimizers."""
        if self._optimizers is not None:
            self._optimizers.follow()
        if self._unknown_optimizers is not None:
            self._unknown_optimizers.require_unchanged()

    @property
    def trains_others(self) -> bool:
        """Whether other parameters are to be trained than those that the running program trains."""
        return self._base is not None and set(self._base.trained_names()) != self._trained

    def changed_programs(self, *, is_step: bool) -> tuple[Signatures, ChangedCodeError] | None:
        """Return the programs to go on with after a change, compiled if that is new, and the change, if there is any.

        Raises:
            ChangedCodeError: where parameters or states would not fit, or there are too many programs already, or
                changes are to be refused.
        """
        if self._base is None:
            return None
        try:
            self._base.require_unchanged(is_step=is_step)
        except ChangedCodeError as change:
            if self._compile is None:
                raise
            self._meet(change.change)
            counts = self._step_counts(self._base.trained_names())
            counted = frozenset(counts.items())
            state = (self._base.state(), counted) if self._keeps else object()
            known = self._programs.get(state)
            if known is None or not is_current(known.base.code, is_step=is_step):
                count = len({id(each) for each in self._programs.values()})
                if not change.may_compile or (count >= MOST_STATES and not change.is_of_training):
                    raise
                if count >= MOST_STATES:
                    # Where layer after layer is trained, earlier states do not come back.
                    self._programs.clear()
                if not self._base.trained_names():
                    raise UserError(
                        f"{change.change}, and no parameter requires a gradient any more, as after "
                        "disable_adapter_layers() of PEFT, so that a step would train nothing. Let one require a "
                        "gradient again before the next step, or compute within `with engine.gathered() as module`."
                    ) from None
                begun = time.perf_counter()
                known = self._compiled(self._base, change, counts)
                self._programs[state] = known
                code = known.base.code
                if code is not None and self._keeps:
                    self._programs[code.state(), counted] = known
                follows = (
                    change.is_of_numbers and code is not None and change.numbers & code.numbers
                )
                if self._rank == 0:
                    seconds = time.perf_counter() - begun
                    outcome = ", and follows it from now on" if follows else ""
                    LOGGER.warning(
                        "%s: it was compiled again in %.1f s%s.", change.change, seconds, outcome
                    )
            return known, change
        return None

    def _compiled(
        self, code: WatchedCode, change: ChangedCodeError, step_counts: StepCounts
    ) -> Signatures:
        """Compile a program that follows the numbers that changed, too, if that is possible."""
        assert self._compile is not None
        compiled = self._compile((code.numbers | change.numbers) - self._unfollowed, step_counts)
        if compiled.base.code is not None:
            self._unfollowed |= compiled.base.code.unfollowed
        return compiled

    def keep(self, moment: Storing, tensors: Mapping[str, Tensor]) -> None:
        """Put tensors where the user's code would store them in a micro-step or an evaluation."""
        if self._code is not None:
            self._code.keep(moment, tensors)

    def borrow(self, codes: Iterable[WatchedCode]) -> None:
        """Gather the present values of tensors that other engines have, and one of these codes uses."""
        tensors = [tensor for code in codes for tensor in code.tensors.values()]
        self._lent = lent_values(dict.fromkeys(tensors))

    def read_tensors(self, program: Program, memory: RankMemory) -> None:
        """Copy the present values of the user's tensors to the program's constants."""
        if self._code is not None:
            read_tensors(self._code.tensors, program, memory, self._lent)
