"""REINFORCE on a world of its own: a walker on a line learns to go to the middle, and stays there."""

import torch
from torch import nn

import dp_ray

MOVES, STEPS = torch.tensor([-1.0, 0.0, 1.0]), 8


class Walker(nn.Module):
    """A policy: the place on the line [rows] to logits of the moves [rows, 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 3))

    def forward(self, places: torch.Tensor) -> torch.Tensor:
        """Return the logits of the moves."""
        logits: torch.Tensor = self.policy(places[:, None] / 4)
        return logits


def walks(number: int = 512) -> range:
    """Return the walks of an epoch: rows without data, which the loop makes itself."""
    return range(number)


def train(run: dp_ray.Loop) -> None:
    """Walk, and make moves likelier that were followed by less distance than of the other walks."""
    update = run.optimizer(torch.optim.Adam(run.model.parameters(), 1e-2))
    moves = MOVES.to(run.device)
    best = run.state("best", {"reward": float("-inf")})  # kept: a run that goes on has it

    def walk(rows: torch.Tensor) -> dict[str, torch.Tensor]:
        place, places, chosen = torch.randint(-4, 5, (len(rows),), device=run.device).float(), [], []
        for _ in range(STEPS):
            move = torch.multinomial(run.model(place).softmax(1), 1)[:, 0]
            places.append(place)
            chosen.append(move)
            place = (place + moves[move]).clamp(-4, 4)
        seen = torch.stack(places, 1)
        return {"places": seen, "moves": torch.stack(chosen, 1), "reward": -place.abs() - seen.abs().mean(1)}

    def loss(walked: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = run.model(walked["places"].flatten()).log_softmax(1).view(-1, STEPS, 3)
        chances = logits.gather(2, walked["moves"][:, :, None])[:, :, 0].sum(1)
        losses: torch.Tensor = -chances * walked["gain"]
        return losses

    for step in run.steps():
        walked = step.gather(walk)  # of all workers, the same on each
        walked["gain"] = walked["reward"] - walked["reward"].mean()
        step.backward(loss, run.model, batch=walked)
        update.step(clip=1.0)
        best["reward"] = max(best["reward"], float(walked["reward"].mean()))
        step.log(reward=walked["reward"].mean(), best=best["reward"])
