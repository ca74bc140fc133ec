"""Triton kernels that set and await flags in the memory of GPUs of one host, a program per peer.

    flags     int64[ranks]: the address of the flag of each peer in channel 0; 0 is clear
    record    int64 of the host's memory: what the host must know (:mod:`.record`)

A kernel that waits for long tells its host, and goes on waiting until the host says stop. A rank
that finds another fingerprint than its own stops once its host has reported it, or after HOST_NS.
To stop is to trap: whatever else is done on the device, the host's next synchronisation included,
ends in an error, so no wrong number is used.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from .record import CALL, DIFFERS, ENDED, SLOT_LENGTH, SLOTS, STATUS, STOP, STOPPED, THEIRS, WAITS

TELL_NS = tl.constexpr(1_000_000_000)  # the host is told of a longer wait
HOST_NS = tl.constexpr(5_000_000_000)  # how long the host has to report a difference
NUMBERS = ["peers", "offset", "call"]
POINTERS = ["flags", "record"]
_CALL, _DIFFERS = tl.constexpr(CALL), tl.constexpr(DIFFERS)
_SLOTS, _SLOT_LENGTH = tl.constexpr(SLOTS), tl.constexpr(SLOT_LENGTH)
_STATUS, _STOP, _STOPPED = tl.constexpr(STATUS), tl.constexpr(STOP), tl.constexpr(STOPPED)
_THEIRS, _WAITS, _ENDED = tl.constexpr(THEIRS), tl.constexpr(WAITS), tl.constexpr(ENDED)


@triton.jit
def nanoseconds() -> Any:
    """The time of the GPU's clock."""
    asm: tl.constexpr = "mov.u64 $0, %globaltimer;"
    return tl.inline_asm_elementwise(asm, "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def shown() -> None:
    """Return once the host can see what was stored."""
    asm: tl.constexpr = "membar.sys; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(asm, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def trap() -> None:
    """End the kernel with an error."""
    asm: tl.constexpr = "trap; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(asm, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def tell(slot: tl.tensor, status: tl.constexpr, call: tl.tensor) -> None:
    """Tell the host."""
    tl.store(slot + _CALL, call)
    shown()
    tl.store(slot + _STATUS, status)
    shown()


@triton.jit
def wait_longer(
    record: tl.tensor, slot: tl.tensor, call: tl.tensor, began: tl.tensor, told: tl.tensor
) -> Any:
    """Tell the host of a long wait, or see whether it says stop. Returns whether it was told."""
    if told == 0:
        if nanoseconds() - began > TELL_NS:
            tell(slot, _WAITS, call)
            told += 1
    else:
        if tl.load(record + _STOP, volatile=True) != 0:
            tell(slot, _STOPPED, call)
            trap()
        if tl.load(slot + _STATUS, volatile=True) == 0:  # cleared by another wait
            tell(slot, _WAITS, call)
    return told


@triton.jit
def flag_of(flags: tl.tensor, peer: tl.tensor, offset: tl.tensor) -> Any:
    """A pointer to a flag; ``offset``: of its channel, in bytes."""
    return (tl.load(flags + peer) + offset).to(tl.pointer_type(tl.int64))


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=POINTERS)
def put(
    flags: tl.tensor, record: tl.tensor, peers: tl.int64, offset: tl.int64, call: tl.int64
) -> None:
    """Set the flag of each of ``peers``, a bit for each, to ``call`` once it is clear."""
    peer = tl.program_id(0)
    if (peers >> peer) & 1 != 0:
        flag = flag_of(flags, peer, offset)
        slot = record + _SLOTS + _SLOT_LENGTH * peer
        clear = call * 0
        began = nanoseconds()
        told = peer * 0
        seen = tl.atomic_cas(flag, clear, call, sem="release", scope="sys")
        while seen != 0:
            told = wait_longer(record, slot, call, began, told)
            seen = tl.atomic_cas(flag, clear, call, sem="release", scope="sys")
        if told != 0:
            tl.store(slot + _STATUS, 0)


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=POINTERS)
def wait(
    flags: tl.tensor, record: tl.tensor, peers: tl.int64, offset: tl.int64, call: tl.int64
) -> None:
    """Wait until the flag of each of ``peers`` is set, clear it, and compare it to ``call``."""
    peer = tl.program_id(0)
    if (peers >> peer) & 1 != 0:
        flag = flag_of(flags, peer, offset)
        slot = record + _SLOTS + _SLOT_LENGTH * peer
        clear = call * 0
        began = nanoseconds()
        told = peer * 0
        seen = tl.atomic_xchg(flag, clear, sem="acquire", scope="sys")
        while seen == 0:
            told = wait_longer(record, slot, call, began, told)
            seen = tl.atomic_xchg(flag, clear, sem="acquire", scope="sys")
        if told != 0:
            tl.store(slot + _STATUS, 0)
        if seen != call:
            tl.store(slot + _THEIRS, seen)
            tell(slot, _DIFFERS, call)
            # The host reports it first: others that find the device's error may end the process.
            began = nanoseconds()
            stop = tl.load(record + _STOP, volatile=True)
            while (stop == 0) & (nanoseconds() - began < HOST_NS):
                stop = tl.load(record + _STOP, volatile=True)
            trap()


@triton.jit(do_not_specialize=["passes"], do_not_specialize_on_alignment=["record"])
def mark(record: tl.tensor, passes: tl.int64) -> None:
    """Tell the host how many passes have ended, unless they ended because it said stop."""
    if tl.load(record + _STOP, volatile=True) != 0:
        trap()
    tl.store(record + _ENDED, passes)
