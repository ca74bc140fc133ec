"""Requests of a CPU and of a GPU."""

from __future__ import annotations

from dataclasses import replace

import torch

from customized_ops.ring_attention.core.kernels import Request

CPU = Request(torch.device("cpu"), torch.bfloat16, 128, 128, 32, 8)
GPU = replace(CPU, device=torch.device("cuda", 0), tokens=32768)
