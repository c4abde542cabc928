"""The default target: SmolLM2-135M-Instruct taught to call tools, by a small LoRA that is merged at pull."""
