"""Train a small vision transformer from scratch to tell the colour of an image, within a memory budget."""

import torch
from torch.utils.data import DataLoader
from transformers import ViTConfig, ViTForImageClassification

from trimtab import Engine

torch.manual_seed(0)
config = ViTConfig(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=32, patch_size=16
)
config.num_labels = 3  # red, green, blue


def make_image(label: int) -> dict[str, torch.Tensor]:
    pixels = torch.randn(3, 32, 32)
    pixels[label] += 1
    return {"pixel_values": pixels, "labels": torch.tensor(label)}


images = [make_image(number % 3) for number in range(640)]
train, test = images[:512], images[512:]

# A dict with the model's names for its inputs: prepare reads the largest batch of the loader to predict the memory of
# a step, and recomputes blocks in backward if it would not fit otherwise. The batch size does not change.
engine = Engine(memory_budget="auto")
model = ViTForImageClassification(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader, test_loader = DataLoader(train, batch_size=32, shuffle=True), DataLoader(test, batch_size=64)
model, optimizer, loader, test_loader = engine.prepare(model, optimizer, loader, test_loader)

for epoch in range(3):
    model.train()
    for batch in loader:
        loss = model(**batch).loss
        engine.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    right = 0
    with torch.no_grad():
        for batch in test_loader:
            right += (model(batch["pixel_values"]).logits.argmax(-1) == batch["labels"]).sum().item()
    print(f"epoch {epoch}: loss {loss.item():.3f}, accuracy {right / len(test):.3f}")
