"""FlashAttention-2, the package ``flash_attn`` (Dao, arXiv:2307.08691, 2023), and FlashAttention-3
for Hopper, the module ``flash_attn_interface`` (Shah et al., arXiv:2407.08608, 2024).

FlashAttention-2's ALiBi counts distances from the bottom right corner of each call, not between
tokens of the whole sequence, and its dropout is drawn by torch's generator, so neither is used.
FlashAttention-3 has neither. Some of its versions take ``deterministic`` and ignore it, as release
2.8 does. They cannot be recognised, so "deterministic" is not declared.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any

from ..protocol.kernel import BackwardOperands, ForwardOperands, Grads, OutLse
from ..protocol.request import HALF, Capabilities
from ..protocol.scoring import Scoring
from ..window.library_calls import PACKED_ARGUMENTS, CallLimits, LibraryCall, Packing
from ..window.lowering import Window
from ..window.signatures import call_by_name, lacking, required
from ..window.windowed import LSE_COLUMNS, kernel_of

INPUTS = ("q", "k", "v")
BACKWARD_ARGUMENTS = ("dout", *INPUTS, "out", "softmax_lse", "dq", "dk", "dv", "deterministic")


@dataclass(eq=False)
class FlashAttention:
    """A kernel, see :class:`~.protocol.Kernel`, through one of the two libraries."""

    NAME: str
    CAPABILITIES: tuple[Capabilities, ...]
    LIBRARY: str  # the module of its functions
    install: str  # how to get it
    versions: str  # which will do
    varlen: bool  # whether packed sequences have functions of their own
    limits: CallLimits
    renames: bool  # whether names of causal and window differ between functions and versions
    constants: dict[str, Any] = field(default_factory=dict)  # further arguments of every call
    forward_constants: dict[str, Any] = field(default_factory=dict)  # and of every forward

    def __post_init__(self) -> None:
        self.forward, self.backward, self.tables = kernel_of(
            self.attend, self.attend_backward, self.limits, same_widths=True
        )

    @cache  # noqa: B019 - the two instances live as long as the process
    def missing(self) -> str | None:
        try:
            library = self._library()
        except Exception as error:  # a library built for another torch raises anything
            return f"{self.LIBRARY} cannot be imported ({error}); {self.install}"
        for of in ("forward", "backward"):
            for packed in (False, True) if self.varlen else (True,):
                lacks = ", ".join(self._lacks(library, of, packed))
                if lacks:
                    package = self.LIBRARY.partition(".")[0]
                    return f"the {package} installed has no {lacks}; it must be {self.versions}"
        return None

    def _lacks(self, library: ModuleType, of: str, packed: bool) -> list[str]:
        """The arguments that a function does not take, or its name if there is none."""
        name = self._name(of, packed)
        function = getattr(library, name, None)
        if function is None:
            return [name]
        operands = BACKWARD_ARGUMENTS if of == "backward" else (*INPUTS, *self.forward_constants)
        options = self._options(function, Scoring(1.0))
        return lacking(function, (*operands, *(PACKED_ARGUMENTS if packed else ()), *options))

    def attend(
        self, given: ForwardOperands, call: LibraryCall, scoring: Scoring, **_: object
    ) -> OutLse:
        function, (q, k, v) = self._function("forward", call.packing), given
        options = self._options(function, scoring, call.window, call.packing)
        out, lse, *_ = call_by_name(function, q=q, k=k, v=v, **self.forward_constants, **options)
        return out, lse

    def attend_backward(
        self,
        given: BackwardOperands,
        call: LibraryCall,
        scoring: Scoring,
        *,
        deterministic: bool,
        **_: object,
    ) -> Grads:
        function = self._function("backward", call.packing)
        dout, q, k, v, out, lse, _dlse = given
        dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))
        call_by_name(
            function,
            **{"dout": dout, "q": q, "k": k, "v": v, "out": out, "dq": dq, "dk": dk, "dv": dv},
            softmax_lse=lse.contiguous(),
            deterministic=deterministic,
            **self._options(function, scoring, call.window, call.packing),
        )
        return dq, dk, dv

    def _library(self) -> ModuleType:
        return importlib.import_module(self.LIBRARY)

    def _name(self, of: str, packed: bool) -> str:
        return f"_flash_attn_varlen_{of}" if self.varlen and packed else f"_flash_attn_{of}"

    def _function(self, of: str, packing: Packing | None) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(self._library(), self._name(of, packing is not None))
        return function

    def _options(
        self,
        function: Callable[..., Any],
        scoring: Scoring,
        window: Window = (-1, -1),
        packing: Packing | None = None,
    ) -> dict[str, Any]:
        """What forward and backward are both given, under the names that ``function`` has."""
        takes = required(function) if self.renames else ()
        options = {
            **self.constants,
            "softmax_scale": scoring.softmax_scale,
            "is_causal" if "is_causal" in takes else "causal": window == (-1, 0),
        }
        if "window_size" in takes:
            options["window_size"] = window
        else:
            options |= {"window_size_left": window[0], "window_size_right": window[1]}
        options["softcap"] = scoring.softcap
        return options if packing is None else options | packing.arguments


def _capabilities(
    arch: tuple[int, int], *more: str, majors: tuple[int, ...] = ()
) -> tuple[Capabilities, ...]:
    features = ("softcap", "window", "lse gradient", *more)
    limits: dict[str, Any] = {"multiple": 8, "lse_columns": LSE_COLUMNS, "majors": majors}
    return (Capabilities("cuda", HALF, features, widest=256, arch=arch, **limits),)


flash2 = FlashAttention(
    NAME="flash2",
    CAPABILITIES=_capabilities((8, 0), "deterministic"),
    LIBRARY="flash_attn.flash_attn_interface",
    install="pip install flash-attn",
    versions="2.7 or newer",
    varlen=True,
    limits=CallLimits(wide_right=False),
    renames=False,
    constants={"dropout_p": 0.0, "alibi_slopes": None},
    forward_constants={"return_softmax": False},
)
flash3 = FlashAttention(
    NAME="flash3",
    CAPABILITIES=_capabilities((9, 0), majors=(9,)),
    LIBRARY="flash_attn_interface",
    install="build it from the folder hopper of the flash-attention repository",
    versions="of 2025 or newer",
    varlen=False,
    limits=CallLimits(),
    renames=True,
)
