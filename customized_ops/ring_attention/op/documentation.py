"""What attention functions share, written once: documentation, signature, nnscaler's annotation."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, TypeVar, get_type_hints

from .options import Options, SharedOptions

Function = TypeVar("Function", bound=Callable[..., Any])

# In the order in which functions take them by keyword.
ARGUMENTS = {
    "q": "[b, l, h, hd], this rank's tokens; any strides.",
    "k, v": "[b, l, g, hd] and [b, l, g, vd]; h is a multiple of g (grouped queries).",
    "softmax_scale": "what scores are multiplied by; None means 1 / sqrt(hd).",
    "dropout_p": """the share of probabilities that become 0, in [0, 1). Which ones is drawn by
        token, head and batch entry, so it is the same on any number of ranks.""",
    "causal": "no token attends a later one.",
    "window_size": "(left, right): token i attends tokens i - left .. i + right; -1 is unbounded.",
    "alibi_slopes": "[h] or [b, h]: what a score loses per token of distance. No gradient.",
    "deterministic": """gradients are the same bit for bit from run to run, which costs some kernels
        time; out always is. ``torch.use_deterministic_algorithms(True)`` asks for it too.""",
    "return_attn_probs": "only False.",
    "enable_ring": "False computes on this rank alone, whatever ``process_group`` says.",
    "use_cute": """True asks for flash-attn-4, as ``kernel="flash4"`` does.""",
    "process_group": """ranks over which l is cut: a ProcessGroup, its global ranks in increasing
        order, or None. Leave it None under an auto-parallelizer, which fills it in.""",
    "cu_seqlens": """[documents + 1], int32 or int64, cumulative lengths of the whole packed
        sequence, the same on every rank. None if not packed.""",
    "return_lse": "also return the log-sum-exp of the scaled scores; gradients flow through it.",
    "max_seqlen_q, max_seqlen_k": "go with ``cu_seqlens``; not needed, checked if given.",
    "softcap": "scores are kept in (-softcap, softcap) by a tanh; 0 is none.",
    "sink": """[h] logits that join the softmax with no value; learnable. On each rank their
        gradient is that of its rows: add up over the group.""",
    "dropout_seed": """an int or an int64 tensor [1], the same on every rank; None draws one from
        torch's generator, which then has to be seeded alike on all ranks.""",
    "layout": """which tokens each rank holds; None means as many on every rank, in order.
        ``Layout.contiguous(total, group_size)`` and ``Layout.from_sizes`` allow uneven shards.""",
    "k_layout": "which tokens of k and v each rank holds.",
    "kernel": """``"auto"``, which is the fastest that can do the call, or one by name: ``flash4``,
        ``flash3``, ``flash2``, ``te``, ``cudnn``, ``torch``, ``flex``, ``cudnn_flex`` or
        ``reference``; or ``te_cp``, TransformerEngine's own context parallelism (see
        ``core/run/te_cp.py``).""",
    "reduce_dtype": """dtype of gradients on the wire: of k and v, and of rows of q computed
        elsewhere. None is q's dtype, or fp32 (fp64 for fp64) where a plan makes a rank compute
        another rank's rows over keys it received, because those gradients may already be sums.
        Accumulation is always in fp32 or wider.""",
    "q_rows": """set by auto-parallelizers that bring k and v whole. (i, n): q is part i of n of the
        sequence, ceil(l / n) tokens each, and k and v are all of it; (0, 1) on one device asks
        for that.""",
    "q_heads": """set by auto-parallelizers: (i, n): q is part i of n, all of one size, of the
        heads, and k and v have all of theirs.""",
    "team_size": """ranks, neighbours in the group, that share out the heads of the same rows
        (Ulysses); divides the group's size, at most h. 1 cuts the sequence alone, all ranks cut
        heads alone, a number between does both. None is what the plan finds the fastest.""",
}

# Entries that differ where cumulative lengths must be given, so that tensors are packed, and where
# they may be given.
PACKED = {
    "q": "[l, h, hd], this rank's tokens; any strides.",
    "k, v": "[l, g, hd] and [l, g, vd]; h is a multiple of g (grouped queries).",
    "cu_seqlens_q, cu_seqlens_k": (
        """[documents + 1], int32 or int64, of the whole sequence, the same
        on every rank: start at 0, never fall (a document may be empty), end at the total over
        all ranks. Lists and CPU tensors cost no sync; a tensor on a device one for each batch."""
    ),
    "alibi_slopes": """[h] or [1, h]: what a score loses per token of distance; the ends of a
        document are aligned where its lengths in q and k differ. No gradient.""",
    "causal": """a token attends its document up to itself; aligned at the documents' ends where
        their lengths in q and k differ.""",
    "enable_ring": """False computes on this rank alone, whatever ``process_group`` says; not inside
        a captured graph, where an engine would give the op its group again.""",
    "layout": """which tokens of q each rank holds; None means
        ``Layout.contiguous(total, group_size)``. It is that of k and v too where they have the
        same total and ``k_layout`` is None. ``"balanced"`` is ``Layout.balanced`` of this mask over
        the hosts of the group; a compiled function is then one for all lengths, while a Layout is
        a constant of it.""",
}
MAYBE_PACKED = {
    "q": "[b, l, h, hd], this rank's tokens; [l, h, hd] with ``cu_seqlens``. Any strides.",
    "k, v": "[b, l, g, hd] and [b, l, g, vd], or packed without b; h is a multiple of g.",
    "cu_seqlens_q, cu_seqlens_k": (
        """[documents + 1], int32 or int64, cumulative lengths of the whole
        packed sequence, the same on every rank; windows end at documents' ends."""
    ),
    "layout": """which tokens each rank holds; None means contiguous shards, as many tokens on every
        rank where not packed.""",
}


def attention_function(function: Function) -> Function:
    """Give a function that takes ``**options: Unpack[SharedOptions]`` its full signature, and add
    to the ``Args`` of its docstring what :data:`ARGUMENTS` says of those that it leaves out."""
    signature = inspect.signature(function)
    parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    by_keyword = inspect.Parameter.KEYWORD_ONLY
    parameters += [
        inspect.Parameter(
            name, by_keyword, default=Options._field_defaults[name], annotation=annotation
        )
        for name, annotation in get_type_hints(SharedOptions).items()
    ]
    order = ", ".join(ARGUMENTS).split(", ")
    parameters.sort(key=lambda p: order.index(p.name) if p.kind is by_keyword else -1)
    function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    if function.__doc__:  # not under python -OO
        lengths = [p for p in parameters if p.name.startswith("cu_seqlens")]
        required = [p for p in lengths if p.default is p.empty]
        entries = ARGUMENTS | (PACKED if required else MAYBE_PACKED if lengths else {})
        function.__doc__ = _described(function.__doc__, entries, [p.name for p in parameters])
    return function


def _described(text: str, entries: dict[str, str], names: list[str]) -> str:
    """The docstring, its ``Args`` completed, in the order of the signature."""
    before, end, tail = text.partition("    Returns:\n")
    head, _, own = before.partition("    Args:\n")
    for entry in filter(None, re.split(r"\n(?=        \w)", own.rstrip())):
        title, _, described = entry.strip().partition(": ")
        for known in [key for key in entries if {*key.split(", ")} & {*title.split(", ")}]:
            del entries[known]
        entries[title] = described
    first = {key: names.index(name) for key in entries if (name := key.split(", ")[0]) in names}
    shown = [
        f"        {key}: " + re.sub(r"\n\s+", "\n            ", entries[key])
        for key in sorted(first, key=lambda key: first[key])
    ]
    return f"{head}    Args:\n" + "\n".join(shown) + f"\n{end}{tail}"


def flash_annotation(function: Callable[..., Any], keys: str = "l") -> Callable[..., str]:
    """``flash_attention_anno`` of the public modules: a call's annotation in nnscaler's notation,
    for wrappers that users themselves register there; ``keys`` annotates tokens of k and v."""
    names = list(inspect.signature(function).parameters)

    def flash_attention_anno(
        query_states: Any, key_states: Any, value_states: Any, *args: Any, **kwargs: Any
    ) -> str:
        """The annotation of a call: its tensors, then out and, with ``return_lse``, lse with heads
        before tokens. Arguments are those of the attention function; tensors by shape alone."""
        given = dict(zip(names, (query_states, key_states, value_states, *args), strict=False))
        given |= kwargs
        h, g = query_states.shape[-2], key_states.shape[-2]
        of_q, of_k = ("num_heads",) * 2 if h == g else (f"(group_num {h // g})", "group_num")
        packed = len(query_states.shape) == 3
        lead = "" if packed else "b "
        inputs = [
            f"{lead}l {of_q} hd^",
            f"{lead}{keys} {of_k} hd^",
            f"{lead}{keys} {of_k} vd^",
        ]
        if packed:
            slopes = given.get("alibi_slopes")
            inputs += ["e^", "e^", of_q if hasattr(slopes, "shape") else "?"]
        lse = f", {lead}{of_q} l" if given.get("return_lse") else ""
        return f"{', '.join(inputs)} -> {lead}l {of_q} vd^{lse}"

    return flash_attention_anno
