"""What a pass gives a device, recorded once, and given again for other tensors of the same shapes.

Between two calls of a plan that differ in nothing but data, all that Python decides is the same:
which views, buffers, copies, kernels and signals follow one another, and on which stream. So one
call is watched, and a :class:`Tape` of it does for the next ones what reached the device, and
nothing else. Unlike a CUDA graph it has no addresses in it: tensors are not copied into buffers of
its own, results are new tensors, and memory is the allocator's.

What makes, writes or launches something in a pass is called by :func:`launch`, :func:`allocate`,
:func:`computed` or :func:`copied`. Views are known by their memory, and reads need not be seen.
What must not be repeated is done :func:`aside`, and :func:`refuse` ends a recording. A library is
called by :func:`call_library`.
"""

from .calls import allocate, aside, computed, copied, launch, record, recording, refuse, run_tape
from .library_call import call_library, launch_kernel
from .making import memory
from .tape import Step, Tape

__all__ = [
    "Step",
    "Tape",
    "allocate",
    "aside",
    "call_library",
    "computed",
    "copied",
    "launch",
    "launch_kernel",
    "memory",
    "record",
    "recording",
    "refuse",
    "run_tape",
]
