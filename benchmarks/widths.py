"""How wide an average should be: the demo's training once, then ten widths by held-out loss and by what the pixel rule
counts (2312.02696).

python benchmarks/widths.py [--json FILE] [--steps N] [--every N] [--seed N] [--known]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import concept
from graft_nodes.headless import embedded

HELD_OUT = (3, 8, 13)  # of the concept's 16 pictures


def trained(
    host: Any, model: Any, clip: Any, vae: Any, steps: int, every: int, seed: int, folder: Path
) -> tuple[Any, Any, Any]:
    """(state, dataset, snapshots) of the demo's run with snapshots of two averages every `every` steps."""
    from graft_nodes.training.averages import sources
    from graft_nodes.training.run.call import run
    from graft_nodes.training.store.store import Store

    begun, data = concept.begun(model, clip, vae, steps, seed, HELD_OUT, every)
    store = Store(folder, "zorp")
    with host.denoiser.open_denoiser(model) as denoiser:
        state = run(begun, steps, lambda: nullcontext(denoiser), data, store).state
    return state, data, sources.sources_of_state(state, store.folder)


def measured(host: Any, model: Any, clip: Any, vae: Any, state: Any, data: Any, found: Any, known: bool) -> list[dict]:
    """A row for the last weights, the running average and each of ten widths."""
    from graft_nodes.demo import score
    from graft_nodes.training.averages import merge
    from graft_nodes.training.averages.held_out_loss import held_out_loss

    loras = {"last weights": state.lora_model(), "running average (ramp, 0.99)": state.lora_model(ema=True)}
    loras |= {
        f"width {width:.4f}": merge.merge_files(found, "width", width, "").lora
        for width in merge.widths_to_try(found, "")
    }
    rows = []
    for name, lora in loras.items():
        with host.denoiser.open_denoiser(model) as denoiser:
            loss = held_out_loss(state, denoiser, data, lora)
        patched = concept.applied(model, lora)
        row = {"name": name, "loss": loss, "concept": score.concept_score(patched, clip, vae)}
        if known:
            row["known"] = score.base_score(patched, clip, vae)
        rows.append(row)
        print(row, flush=True)
    return rows


def table(rows: list[dict]) -> str:
    """Rows as Markdown."""
    heads = ["weights", "held-out loss", "concept, of 16", *(["base, of 48"] if "known" in rows[0] else [])]
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)]]
    lines += [
        [row["name"], f"{row['loss']:.5f}", *(str(row[key]) for key in ("concept", "known") if key in row)]
        for row in rows
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Train, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--known", action="store_true", help="count the base's 48 captions too")
    options = parser.parse_args()
    embedded.install()
    from graft_nodes import host
    from graft_nodes.demo import host_model
    from graft_nodes.demo.score import BASE

    model, clip, vae = host_model.demo_model(str(BASE))
    with tempfile.TemporaryDirectory() as folder:
        state, data, found = trained(host, model, clip, vae, options.steps, options.every, options.seed, Path(folder))
        rows = measured(host, model, clip, vae, state, data, found, options.known)
    print(f"\n{options.steps} steps, snapshots every {options.every}, seed {options.seed}\n\n{table(rows)}")
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
