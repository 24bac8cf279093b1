# python examples/gpt_single.py
"""Train a GPT on English text, byte by byte, in one process.

python examples/gpt_single.py

mlp_digits.py with another model and other data: windows of text, in which each byte is to be told from those before
it. Without ranks a plain backward is enough. Of a byte the untrained model knows nothing, a loss of 5.5 nats; after
600 steps, in less than a minute, it is below 1.9. gpt_ddp.py, gpt_pipeline.py and gpt_hybrid.py show the same loss at
every step.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # one a rank; NumPy reads it when it loads

from common.settings import GPTSingleSettings
from common.text import load_tokens, split
from distributed import world
from distributed.data.batches import TokenBatches
from distributed.run import Run, read_settings, run_script
from minigrad import backward, cross_entropy
from minigrad.models import gpt
from minigrad.optim import AdamW, Optimizer


def main() -> None:
    settings = read_settings(GPTSingleSettings, __doc__)
    tokens = load_tokens(settings.text, vocab_size=settings.vocab)
    train, _ = split(tokens, context=settings.context)
    comm = world()
    run = Run(settings, comm, samples="tokens", size=settings.context, loss_unit="nats a token")

    config = gpt.GPTConfig(settings.vocab, settings.context, settings.layers, settings.heads, settings.width)
    model = gpt.GPT(config, seed=settings.seed, dtype=settings.dtype)
    optimizer = Optimizer(model.parameters(), AdamW(settings.lr))
    batches = TokenBatches(
        train,
        batch_size=settings.batch,
        context=settings.context,
        seed=settings.seed,
    )

    for _ in run.steps(model, optimizer, batches):
        x, y = batches.next()
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        backward(loss)
        optimizer.step()
        run.log(loss.item())
    run.end()


if __name__ == "__main__":
    run_script(main)
