"""What a pass gives a device, recorded once, and given again for other tensors of the same shapes.

Between two calls of a plan that differ in nothing but data, all that Python decides is the same:
which views, buffers, copies, kernels and signals follow one another, and on which stream. So one
call is watched, and a :class:`Tape` of it does for the next ones what reached the device, and
nothing else. Unlike a CUDA graph it has no addresses in it: tensors are not copied into buffers of
its own, results are new tensors, and memory is the allocator's.

What is seen is each function of torch that Python calls, and what this package launches by
:func:`launch`. (Noting what torch dispatches would take the host longer.) Anything else that a
pass does to a device would be lost, so :func:`refuse` ends a recording, as does a function that is
not known. A library that reads too many properties to be watched is called by :func:`call_library`.
"""

from .library_call import allocate, call_library, copied, launch_kernel
from .recorder import launch, record, recording, refuse
from .tape import Step, Tape

__all__ = [
    "Step",
    "Tape",
    "allocate",
    "call_library",
    "copied",
    "launch",
    "launch_kernel",
    "record",
    "recording",
    "refuse",
]
