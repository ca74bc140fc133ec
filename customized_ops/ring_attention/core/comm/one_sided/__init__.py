"""Writing token ranges straight into the memory of the ranks that need them.

    sender                                    receiver
    1. wait until all are done with the
       pass before (begin)
    2. copy each range to its place in the
       receiver's buffer, by the copy engine
    3. signal "arrived"                  -->  4. wait for the signal, read the buffer in place
                                              5. signal "done" to all (end)

Tokens that are one range, and one block of memory in the dtype in which they travel, are neither
packed nor unpacked, and no GPU thread moves a byte of them. A kernel writes everything else to the
receiver: a share of the heads, lse, gradients that become wider.

A pass is a forward or a backward. Its exchanges have places in one arena, of the same size on every
rank, so that every rank knows where to write (``placement``). The arena grows to the largest pass,
is reused by all layers and plans of the group, and is freed with the group.

Each signal is the sender's fingerprint of its pass (``signals``): a receiver that is in another
pass finds this out while it waits, and reads nothing.

Results that go home at the end of a backward may be written over the keys that were fetched last.
Then ranks first say when they have read those keys:

    receiver of results                       their sender
    1. signal "free" once it has attended
       the keys it fetched               -->  2. wait for the signal, copy the results, signal
                                                 "arrived"

``one_sided_comm`` does this, in the memory of an ``arena``, which ``symmetric`` provides on GPUs of
one host.
"""
