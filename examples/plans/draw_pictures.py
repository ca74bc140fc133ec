"""Draw the pictures of the documentation's pages, each a plan. Needs matplotlib and pillow.

python examples/plans/draw_pictures.py              where the pages expect them
python examples/plans/draw_pictures.py --into /tmp
"""

from __future__ import annotations

import argparse
from pathlib import Path

from PIL import Image

from customized_ops.ring_attention import AttnMask, Layout, Plan, make_plan

PAGES = Path(__file__).parents[2] / "customized_ops" / "ring_attention" / "docs"
TOKENS, RANKS = 16_384, 4
COLOURS = 64
HEADS = {"q_heads": 32, "kv_heads": 8, "head_dim": 128}
DOCUMENTS = [0, 500, 700, 4_000, 5_200, 5_900, 9_000, 14_000, TOKENS]


def pictures() -> dict[str, Plan]:
    """Each picture's file name and plan."""
    causal = AttnMask.causal(TOKENS)
    packed = AttnMask.varlen(DOCUMENTS, causal=True)
    contiguous = Layout.contiguous(TOKENS, RANKS)
    diffusion = AttnMask.block_diffusion(TOKENS // 2, 1024)
    paired = Layout.paired(Layout.zigzag(TOKENS // 2, RANKS))
    return {
        "plans_contiguous.png": make_plan(causal, contiguous),
        "layouts_paired.png": make_plan(diffusion, paired),
        "layouts_contiguous.png": make_plan(packed, contiguous, assignment="owner"),
        "layouts_balanced.png": make_plan(
            packed, Layout.balanced(packed, RANKS), assignment="owner"
        ),
    }


def draw(name: str, into: Path) -> None:
    """Draw one picture in few colours, which takes a tenth of the bytes."""
    pictures()[name].draw(into / name, **HEADS)
    Image.open(into / name).convert("RGB").quantize(COLOURS).save(into / name, optimize=True)


def main() -> None:
    """Draw all pictures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--into", type=Path, default=PAGES)
    into = parser.parse_args().into
    into.mkdir(parents=True, exist_ok=True)
    for name in pictures():
        draw(name, into)
        print(into / name)


if __name__ == "__main__":
    main()
