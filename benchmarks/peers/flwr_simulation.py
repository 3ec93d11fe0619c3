"""Flower: the message API on its simulation engine (Ray), one client at a time on one core.

`run_simulation` starts the same engine as `flwr run` without a project folder. Clients keep images in memory from one
message to the next, and evaluation by clients is off. A message names the client whose data to train on, so that the
cohort is the others'.
"""

from clock import Clock, finish
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from task import own

client_app, server_app = ClientApp(), ServerApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    task, told = own(), message.content["config"]
    model = task.model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    task.train(model, told["client"], told["server-round"] - 1)
    metrics = MetricRecord({"num-examples": task.steps * task.batch})
    return Message(
        content=RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message
    )


class Strategy(FedAvg):
    clock: Clock

    def _construct_messages(self, record, node_ids, message_type):  # type: ignore[no-untyped-def]
        config = record["config"]
        for node, client in zip(node_ids, own().chosen(config["server-round"] - 1), strict=True):
            named = ConfigRecord({**config, "client": client})
            yield Message(
                content=RecordDict({"arrays": record["arrays"], "config": named}),
                message_type=message_type,
                dst_node_id=node,
            )

    def aggregate_train(self, server_round, replies):  # type: ignore[no-untyped-def]
        mean = super().aggregate_train(server_round, replies)
        self.clock.round()
        return mean


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    task = own()
    model = task.model()
    strategy = Strategy(
        fraction_train=task.cohort / task.clients, fraction_evaluate=0.0, min_available_nodes=task.clients
    )
    strategy.clock = Clock()
    result = strategy.start(grid=grid, initial_arrays=ArrayRecord(model.state_dict()), num_rounds=task.rounds)
    model.load_state_dict(result.arrays.to_torch_state_dict())
    finish(task, strategy.clock, model, "flwr")


if __name__ == "__main__":
    run_simulation(
        server_app,
        client_app,
        num_supernodes=own().clients,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": 1, "include_dashboard": False},
        },
    )
