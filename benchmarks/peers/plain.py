"""What a researcher writes without a framework: copies of the model, a loop over clients, a loop over the state."""

import copy

import torch
from clock import Clock, finish
from task import own


def main() -> None:
    task = own()
    server = task.model()
    if task.channels_last:
        server = server.to(memory_format=torch.channels_last)
    task.load()
    clock = Clock()
    for round in range(task.rounds):
        states = []
        for client in task.chosen(round):
            model = copy.deepcopy(server)
            task.train(model, client, round)
            states.append(copy.deepcopy(model.state_dict()))
        mean = {name: sum(state[name] for state in states) / len(states) for name in states[0]}
        server.load_state_dict(mean)
        clock.round()
    finish(task, clock, server, "torch")


if __name__ == "__main__":
    main()
