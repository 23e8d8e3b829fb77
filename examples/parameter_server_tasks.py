"""Random tasks on a parameter server: the server gives numbers to the workers, which work on them and send them back.

    p2pnode run --set node.role=server -- python examples/parameter_server_tasks.py

Every worker joins with the address of the server, or of any other node:

    p2pnode run --bootstrap HOST:PORT -- python examples/parameter_server_tasks.py

The task of a worker that is killed is given to another one. With a second server the run outlives the first.
"""

import argparse
import time

import p2pnode


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--barrier", default="pssp", choices=("bsp", "ssp", "asp", "pbsp", "pssp"))
    parser.add_argument("--updates", type=int, default=300, help="how many tasks in all")
    parser.add_argument("--work", type=float, default=0.05, help="mean seconds of a task")
    arguments = parser.parse_args()
    engine = p2pnode.engine("server")

    @engine.register_schedule
    def schedule(ctx, workers):
        # A pair (key, value) goes to the worker as it is; a key alone would come with its value at the server.
        return {worker: [(f"bin {ctx.rng.randrange(10)}", ctx.rng.randrange(1000))] for worker in workers}

    @engine.register_push
    def push(ctx, params):
        time.sleep(ctx.rng.expovariate(1.0 / arguments.work) if arguments.work else 0.0)
        return [(key, [1, value]) for key, value in params]

    @engine.register_pull
    def pull(ctx, updates):
        found = {one.key: ctx.get(one.key, [0, 0]).value for one in updates}
        for one in updates:
            found[one.key] = [old + new for old, new in zip(found[one.key], one.value, strict=True)]
        return [(key, value, 0) for key, value in found.items()]

    @engine.register_stop
    def stop(ctx):
        return ctx.version >= arguments.updates

    done = engine.start(barrier=arguments.barrier, staleness=4, sample=10)
    if engine.is_server:
        bins = [engine.get(key).value for key in sorted(engine.keys())]
        print(f"{done} updates; {sum(count for count, _ in bins)} tasks in {len(bins)} bins")
    else:
        print(f"this worker completed {done} tasks")


if __name__ == "__main__":
    main()
