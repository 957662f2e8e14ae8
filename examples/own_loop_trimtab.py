"""Train a small transformer from scratch to tell whether a sequence contains more ones than twos."""

import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

from trimtab import Engine

torch.manual_seed(0)
config = BertConfig(vocab_size=8, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)
tokens = torch.randint(1, 3, (2048, 15))
labels = ((tokens == 1).sum(1) > (tokens == 2).sum(1)).long()
train, test = TensorDataset(tokens[:1792], labels[:1792]), TensorDataset(tokens[1792:], labels[1792:])

engine = Engine(mixed_precision="no")
model = BertForSequenceClassification(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader, test_loader = DataLoader(train, batch_size=32, shuffle=True), DataLoader(test, batch_size=64)
scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=20, num_training_steps=3 * len(loader))
model, optimizer, loader, scheduler = engine.prepare(model, optimizer, loader, scheduler)

for epoch in range(3):
    model.train()
    for ids, label in loader:
        loss = model(input_ids=ids.to(model.device), labels=label.to(model.device)).loss
        engine.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    model.eval()
    right = 0
    with torch.no_grad():
        for ids, label in test_loader:
            right += (model(ids.to(model.device)).logits.argmax(-1) == label.to(model.device)).sum().item()
    print(f"epoch {epoch}: loss {loss.item():.3f}, accuracy {right / len(test):.3f}")
