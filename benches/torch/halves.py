"""The model of `rpc_rounds.py`, in a separate module because RPC sends its class by name and both processes import it."""

import torch

SIDE = 1000


class Half(torch.nn.Module):
    """One of two linear layers on its device; its result is on the CPU if `through_cpu` is set."""

    def __init__(self, device: str, through_cpu: bool) -> None:
        super().__init__()
        self.device = device
        self.through_cpu = through_cpu
        self.layer = torch.nn.Linear(SIDE, SIDE).to(device)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        result = self.layer(values.to(self.device))
        return result.cpu() if self.through_cpu else result


def echo(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor unchanged, on the device that the device map selected."""
    return tensor


def echo_through_card(tensor: torch.Tensor) -> torch.Tensor:
    """Copies a tensor from the CPU to the second device and back."""
    return tensor.to("cuda:1").cpu()
