"""Custom ops with annotations, for auto-parallelizers and for calling directly.

| page | about |
|---|---|
| `customized_ops.ring_attention` | attention: options, errors, kernels |
| `customized_ops.ring_attention.core.mask` | which pairs attend |
| `customized_ops.ring_attention.core.layout` | which rank holds which tokens |
| `customized_ops.ring_attention.core.plan` | who computes what, and what moves |
| `customized_ops.ring_attention.core.kernels` | attention on one device |
| `customized_ops.ring_attention.core` | design: numerics, speed, decisions |
| `customized_ops.ring_attention.api` | other packages' names |
| `customized_ops.ring_attention.api.transformers` | Hugging Face models |
| `customized_ops.chunk_linear_cross_entropy` | the loss without its logits |
| `annotations` | annotating an op |
| `annotations.engines.torch` | planning and training a whole model |
| `annotations.engines` | nnscaler |
| `benchmark` | what was measured |
"""

__all__: list[str] = []  # its modules are imported by their names
