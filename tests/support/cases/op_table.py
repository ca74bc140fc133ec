"""The table of cases that every way of running the ops goes through."""

from __future__ import annotations

from dataclasses import replace

from op_cases import Case

from customized_ops.ring_attention import AttnMask

PACKED = dict(length=45, cu_seqlens=(0, 7, 7, 8, 30, 45))
OTHER = (0, 9, 10, 10, 20, 38)
HOLES = AttnMask.from_slices([(3, 9, 12, 20, -24, 24), (20, 22, 0, 1, -24, 24)], 24, 24)

TABLE = {
    "causal": Case("ring", 32),
    "full": Case("ring", 32, causal=False),
    "window": Case("ring", 32, causal=False, window=(5, 2)),
    "causal window": Case("ring", 32, window=(9, -1)),
    "grouped 4:1": Case("ring", 32, heads=(8, 2)),
    "one key head": Case("ring", 32, heads=(6, 1)),
    "batch 3": Case("ring", 24, batch=3),
    "odd length": Case("ring", 37, sizes=None),
    "fewer tokens than ranks": Case("ring", 3),
    "one token": Case("ring", 1),
    "v wider": Case("ring", 32, dims=(8, 12)),
    "v narrower": Case("ring", 32, dims=(8, 3)),
    "strided inputs": Case("ring", 32, heads=(4, 2), strided=True),
    "zigzag": Case("zigzag", 32),
    "zigzag full": Case("zigzag", 32, causal=False),
    "zigzag window": Case("zigzag", 33, window=(6, 0)),
    "zigzag one key head": Case("zigzag", 32, heads=(6, 1)),
    "zigzag two-sided window": Case("zigzag", 29, causal=False, window=(4, 3)),
    "zigzag strided": Case("zigzag", 24, heads=(4, 2), strided=True, batch=2),
    "fused qkv": Case("ring", 24, heads=(4, 2), fused=True, batch=2),
    "packed fused qkv": Case("varlen", heads=(4, 2), fused=True, **PACKED),
    "zigzag odd, grouped": Case("zigzag", 37, heads=(8, 2), batch=3),
    "zigzag laid out so": Case("zigzag", 37, layout="zigzag"),
    "packed": Case("varlen", **PACKED),
    "packed full": Case("varlen", causal=False, **PACKED),
    "packed window": Case("varlen", window=(4, -1), **PACKED),
    "packed grouped": Case("varlen", heads=(8, 2), **PACKED),
    "packed strided": Case("varlen", heads=(4, 1), strided=True, **PACKED),
    "packed, one document": Case("varlen", 16, cu_seqlens=(0, 16)),
    "packed, tokens alone": Case("varlen", 6, cu_seqlens=tuple(range(7))),
    "packed, empty ends": Case("varlen", 9, cu_seqlens=(0, 0, 9, 9, 9)),
    "packed, keys of other lengths": Case("varlen", heads=(4, 2), cu_seqlens_k=OTHER, **PACKED),
    "sliding window": Case("window", 33, window=(5, -1), heads=(4, 2)),
    "sliding window, both sides": Case("window", 32, causal=False, window=(20, 3), batch=2),
    "sliding window, packed": Case("packed window", window=(4, 0), heads=(4, 2), **PACKED),
    "streaming": Case("streaming", 37, window=(4, -1), sink_tokens=3, batch=2),
    "streaming, no sinks": Case("streaming", 16, window=(3, -1)),
    "streaming, packed": Case("packed streaming", window=(2, -1), sink_tokens=2, **PACKED),
    "masked prefix": Case("masked", 40, given=AttnMask.prefix_lm(40, 9), heads=(4, 2), batch=2),
    "masked global and local": Case("masked", 48, given=AttnMask.global_local(48, 3, 5)),
    "masked cross": Case("masked", 6, given=AttnMask.causal(6, 50), heads=(4, 2)),
    "masked, rows with no key": Case("masked", 24, given=HOLES),
    "softcap": Case("ring", 32, softcap=1.5, heads=(4, 2)),
    "alibi": Case("ring", 32, alibi=True, heads=(8, 2)),
    "alibi, keys of other lengths": Case("varlen", alibi=True, cu_seqlens_k=OTHER, **PACKED),
    "alibi, cross": Case("masked", 6, given=AttnMask.causal(6, 50), alibi=True),
    "dropout": Case("ring", 32, dropout=0.3, heads=(8, 2), batch=2),
    "dropout, zigzag laid out so": Case("zigzag", 37, layout="zigzag", dropout=0.5),
    "dropout, packed": Case("varlen", dropout=0.2, **PACKED),
    "sinks": Case("ring", 32, sink=True, heads=(4, 2), batch=2),
    "sinks, packed, window": Case("packed window", sink=True, window=(4, 0), **PACKED),
    "sinks, rows with no key": Case("masked", 24, given=HOLES, sink=True),
    "all of it": Case(
        "masked",
        40,
        given=AttnMask.streaming(40, 6, 2),
        softcap=2.0,
        alibi=True,
        dropout=0.25,
        sink=True,
        heads=(8, 4),
        dims=(8, 5),
        batch=2,
    ),
}

UNEVEN = {
    2: {
        "uneven": Case("ring", 20, sizes=(13, 7), heads=(4, 2)),
        "empty rank": Case("ring", 20, sizes=(0, 20)),
        "zigzag uneven": Case("zigzag", 20, sizes=(3, 17)),
        "packed uneven": replace(TABLE["packed"], sizes=(44, 1)),
        "cross, other layouts": replace(TABLE["masked cross"], sizes=(1, 5), k_sizes=(40, 10)),
        "streaming uneven": replace(TABLE["streaming"], sizes=(36, 1)),
    },
    4: {
        "uneven": Case("ring", 20, sizes=(13, 0, 2, 5), heads=(4, 2)),
        "empty ranks": Case("ring", 20, sizes=(0, 0, 20, 0), batch=2),
        "zigzag uneven": Case("zigzag", 20, sizes=(3, 10, 6, 1)),
        "packed uneven": replace(TABLE["packed"], sizes=(1, 30, 0, 14)),
        "cross, other layouts": replace(
            TABLE["masked cross"], sizes=(0, 1, 3, 2), k_sizes=(40, 0, 9, 1)
        ),
        "all of it uneven": replace(TABLE["all of it"], sizes=(3, 30, 0, 7)),
    },
    8: {
        "uneven": Case("ring", 40, sizes=(13, 0, 2, 5, 9, 1, 7, 3), heads=(4, 2)),
        "empty ranks": Case("ring", 20, sizes=(0, 0, 0, 12, 0, 0, 8, 0), batch=2),
        "zigzag uneven": Case("zigzag", 40, sizes=(3, 10, 6, 1, 0, 12, 7, 1)),
        "packed uneven": replace(TABLE["packed"], sizes=(1, 0, 20, 0, 3, 14, 6, 1)),
        "cross, other layouts": replace(
            TABLE["masked cross"],
            sizes=(0, 1, 0, 3, 0, 0, 2, 0),
            k_sizes=(20, 0, 9, 1, 0, 11, 0, 9),
        ),
        "all of it uneven": replace(TABLE["all of it"], sizes=(3, 9, 0, 7, 1, 18, 0, 2)),
    },
}
