"""What a model is fine-tuned on: tasks from files, from the hub, and the batches made of them."""
