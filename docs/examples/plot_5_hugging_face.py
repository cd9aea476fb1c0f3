"""
A Hugging Face regression head
==============================

A transformer reads a text and returns one number, such as how positive a reference
letter is. Letters about the two groups use different words, so the scores differ. The
model is built from a configuration and trained here for a few seconds, so nothing is
downloaded; a model loaded by ``from_pretrained`` works the same way.
"""

import matplotlib.pyplot as plt
import torch
from transformers import DistilBertConfig, DistilBertForSequenceClassification

from esvdfair import Effort, ESVDFair
from esvdfair.plots import plot_densities

# %%
# Made-up letters of twelve words. Words 3 to 22 are praise and raise the score. Words
# 40 to 59 say nothing about the person but are used more often about one group. The
# raters liked them, so the labels depend on them too.

torch.manual_seed(0)
people, words = 1500, 12
group = torch.randint(0, 2, (people,))
letters = torch.randint(3, 40, (people, words))
coloured = torch.rand(people, words) < 0.1 + 0.3 * group[:, None]
letters = torch.where(coloured, torch.randint(40, 60, (people, words)), letters)
score = (
    (letters < 23).float().mean(1) + 1.2 * coloured.float().mean(1)
) * 4 + 0.3 * torch.randn(people)
encoding = {
    "input_ids": letters,
    "attention_mask": torch.ones_like(letters),
}  # what a tokenizer gives

# %%
# A small DistilBERT with a regression head (``num_labels=1``).

config = DistilBertConfig(
    vocab_size=60,
    max_position_embeddings=words,
    dim=32,
    hidden_dim=64,
    n_layers=1,
    n_heads=2,
    num_labels=1,
    dropout=0.0,
    attention_dropout=0.0,
    seq_classif_dropout=0.0,
)
model = DistilBertForSequenceClassification(config)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
train = torch.arange(people) < 900
for _ in range(8):
    for rows in train.nonzero().squeeze(1)[torch.randperm(900)].split(64):
        optimizer.zero_grad()
        predicted = model(
            input_ids=letters[rows],
            attention_mask=encoding["attention_mask"][rows],
        ).logits
        torch.nn.functional.mse_loss(predicted.squeeze(1), score[rows]).backward()
        optimizer.step()
model.eval()

# %%
# The model returns an object with several fields; ``output="logits"`` names the
# prediction. Inputs are passed by name. Only the last layer of the head changes, and
# ``save_pretrained`` works as before.


def some(rows):
    """Encoding, labels and groups of some people."""
    return (
        {name: values[rows] for name, values in encoding.items()},
        score[rows].numpy(),
        group[rows].numpy(),
    )


X, y, a = some(train)
fair = ESVDFair(model, output="logits", target_ks=0.12, effort=Effort.quick())
fair.fit(X, y, sensitive_features=a, validation=some(~train))
changed = [
    name
    for (name, before), after in zip(
        model.named_parameters(), fair.estimator_.parameters(), strict=True
    )
    if not torch.equal(before, after)
]
print(type(fair.estimator_).__name__, "with new values in", ", ".join(changed))
print(f"KS {fair.summary_['ks_before']:.3f} -> {fair.summary_['ks_after']:.3f}")

# %%
# Predictions for the validation letters.

X_val, _, a_val = some(~train)
with torch.no_grad():
    before, after = (
        found(**X_val).logits.squeeze(1).numpy() for found in (model, fair.estimator_)
    )
figure, axes = plt.subplots(1, 2, figsize=(8, 3.8), sharex=True, layout="constrained")
for ax, name, predictions in zip(
    axes, ("original", "repaired"), (before, after), strict=True
):
    plot_densities(predictions, sensitive_features=a_val, ax=ax)
    ax.set_title(f"{name}: {ax.get_title(loc='left')}", loc="left")
