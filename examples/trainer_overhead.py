"""What the trainer costs: its steps against the bare ones of the same model on the same text.

    python examples/trainer_overhead.py [--recipe zaremba-small] [--steps 200]

A bare step is forward, backward, clipping and update, with carried states. Both kinds alternate,
so whatever else the machine does, it does to both.
"""

import argparse
import statistics
import tempfile
import time

import torch

from fused_recoder.training import Batches, Config, Trainer, build_model, sample_corpus
from fused_recoder.training.model import build_optimizer


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="zaremba-small")
    parser.add_argument("--signal", default="nll")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    config = Config.recipe(arguments.recipe, signal=arguments.signal, max_vocab=10_000)

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(config, sample_corpus(), folder)
        model = build_model(config, len(trainer.corpus.vocabulary)).train()
        optimizer = build_optimizer(model, config)
        batches = Batches(trainer.corpus["train"], config.batch_size, config.bptt)
        hx = None

        def bare_step(window):
            nonlocal hx
            inputs, targets = batches[window]
            optimizer.zero_grad()
            out = model(inputs, targets, hx)
            (out.loss * len(inputs) if config.loss == "sum" else out.loss).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
            optimizer.step()
            hx = tuple(state.detach() for state in out.hx)

        def seconds(step):
            start = time.perf_counter()
            step()
            return time.perf_counter() - start

        pairs = []
        for window in range(arguments.steps + 5):
            # Which comes first alternates, too: the caches are warmer for the second.
            kinds = [lambda: trainer.step(), lambda: bare_step(window)]  # noqa: B023
            if window % 2:
                bare, ours = seconds(kinds[1]), seconds(kinds[0])
            else:
                ours, bare = seconds(kinds[0]), seconds(kinds[1])
            pairs.append((ours, bare))
        pairs = pairs[5:]  # without the first steps, which load and allocate
    ratio = statistics.median(ours / bare for ours, bare in pairs)
    bare = statistics.median(bare for _, bare in pairs)
    total = sum(ours for ours, _ in pairs) / sum(bare for _, bare in pairs)
    print(
        f"{arguments.recipe}, {arguments.signal}, a row of metrics every {config.log_every} steps"
    )
    print(
        f"bare step {1000 * bare:.1f} ms; the trainer's takes {100 * (ratio - 1):+.1f} % (median)"
    )
    print(f"all {len(pairs)} steps, rows of metrics included: {100 * (total - 1):+.1f} %")


if __name__ == "__main__":
    main()
