"""A rank leaves while its message is still under way.

Retold from pytorch/PiPPy#1139. On gloo, rank 1 gets `Connection closed by peer`.

distlab sim --ranks 2 --sanitize examples/museum/gone_too_early.py
torchrun --nproc-per-node 2 examples/museum/gone_too_early.py
"""

import time

import torch
import torch.distributed as dist


def main() -> None:
    """Send the activations of the first stage to the second one, which starts late."""
    dist.init_process_group()
    activations = torch.full((2**20,), 7.0)
    if dist.get_rank() == 0:
        dist.isend(activations, 1)
    else:
        time.sleep(1)
        dist.recv(activations, 0)
        print(f"rank 1 got {activations[0].item()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
