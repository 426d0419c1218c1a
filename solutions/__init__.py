"""The solutions of every lesson, laid out like the phases. Plain torch.distributed, no distlab."""
