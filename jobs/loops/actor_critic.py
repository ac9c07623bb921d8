"""Actor and critic: carts learn to balance a pole, by the errors with which a critic foretells how long they will."""

import torch
from torch import nn

import dp_ray

MOVES, KEEPS = 16, 0.98  # moves of a cart in a step, and how much the next move's worth counts


def pushed(carts: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return carts (place, speed, angle, turn) [rows, 4] 0.02 s later, pushed to the right or left by 10 N.

    A cart has 1 kg, and its pole 0.1 kg and 1 m: Barto, Sutton and Anderson, 1983.
    """
    _, speed, angle, turn = carts.unbind(1)
    sine, cosine = angle.sin(), angle.cos()
    push = (20.0 * right - 10 + 0.05 * turn.square() * sine) / 1.1
    turning = (9.8 * sine - cosine * push) / (0.5 * (4 / 3 - 0.1 * cosine.square() / 1.1))
    return carts + 0.02 * torch.stack([speed, push - 0.05 * turning * cosine / 1.1, turn, turning], 1)


def fallen(carts: torch.Tensor) -> torch.Tensor:
    """Whether each cart is off the track, or its pole further than 12 degrees from upright."""
    return (carts[:, 0].abs() > 2.4) | (carts[:, 2].abs() > 0.2095)


class Balance(nn.Module):
    """Actor and critic; called, it gives the logits of a push to the left and to the right, [rows, 2]."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))
        self.critic = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, carts: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.actor(carts)
        return logits


def carts(number: int = 640) -> range:
    """Return the rows of an epoch, which have no data: a batch of them stands for as many carts."""
    return range(number)


def train(run: dp_ray.Loop) -> None:
    """Play on, teach the critic, and make pushes likelier that went better than it foretold."""
    actor, critic = run.model.actor, run.model.critic
    of_actor = run.optimizer(torch.optim.Adam(actor.parameters(), 3e-3))
    of_critic = run.optimizer(torch.optim.Adam(critic.parameters(), 1e-2))
    world = run.state("world", {"carts": torch.zeros(64, 4, device=run.device)})

    def play(world: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        carts, seen, pushes, fell = world["carts"], [], [], []
        for _ in range(MOVES):
            seen.append(carts)
            pushes.append(torch.multinomial(run.model(carts).softmax(1), 1)[:, 0])
            carts = pushed(carts, pushes[-1])
            fell.append(fallen(carts))
            carts = torch.where(fell[-1][:, None], torch.rand_like(carts) / 10 - 0.05, carts)
        seen.append(carts)
        return {"seen": torch.stack(seen, 1), "pushes": torch.stack(pushes, 1), "fell": torch.stack(fell, 1)}

    def of_worth(played: dict[str, torch.Tensor]) -> dict[str, object]:
        worth = critic(played["seen"])[:, :, 0]
        later = KEEPS * worth[:, 1:].detach() * ~played["fell"]
        error = 1 + later - worth[:, :-1]
        return {"loss": error.square(), "outputs": {"error": error}}

    def of_pushes(played: dict[str, torch.Tensor]) -> torch.Tensor:
        chances = actor(played["seen"][:, :-1]).log_softmax(2)
        chosen: torch.Tensor = chances.gather(2, played["pushes"][:, :, None])[:, :, 0]
        return -chosen * played["error"]

    for step in run.steps():
        played = step.gather(play, batch=world)
        world["carts"] = played["seen"][:, -1]
        step.backward(of_worth, critic, batch=played, keep=played)  # adds the errors
        of_critic.step(clip=1.0)
        step.backward(of_pushes, actor, batch=played)
        of_actor.step(clip=1.0)
        step.log(fell=played["fell"].float().mean())
