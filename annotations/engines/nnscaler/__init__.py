"""The nnscaler engine: declared functions become nnscaler ops, cut and emitted by our rules.

Importing this package registers every declared function (:mod:`annotations.codegen.public_call`)
with nnscaler 0.9; functions declared later are registered as they are declared, ops of
``register_op`` at the next :func:`register`, which :func:`parallelize` calls.

trace     wrap_ring_attn_func(q, k, v)          timing: a fake, shapes only
graph     OpNode                                op_node: annotated from our annotation
cut       parts of the node                     op_node: with the shard's arguments, q_heads=(1, 2)
profile   a call on one device                  timing: with as many keys as among its peers
emit      wrap_ring_attn_func(q=..., process_group=[2, 3])                    generated_code
"""

from annotations.codegen import public_call

from .generated_code import emit
from .op_node import OpNode, cut_however_small, make_node, register, see_every_call
from .parallelization import as_config, parallelize, plan_with_ours

register()
see_every_call()
cut_however_small()
plan_with_ours()
public_call.on_declare(register)

__all__ = ["OpNode", "as_config", "emit", "make_node", "parallelize", "register"]
