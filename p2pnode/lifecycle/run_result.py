"""The end of a run: the model that all nodes agree on, its file, and what to tell the user.

Every node takes the values of a shard in the bits that its owner and backup share
(`training.exchange.owner.final_values`). Buffers are tensors outside the vector that training changes, as counters.
All nodes take those of one node, so nodes that finish together write the same bytes; `docs/faults.md` says when they
do not.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from p2pnode.lifecycle.environment import NodePart
from p2pnode.lifecycle.model_export import SAFETENSORS, CannotExport, ModelExport
from p2pnode.training.exchange.exchange import Exchange
from p2pnode.training.exchange.ownership_messages import MAX_BUFFERS_BYTES
from p2pnode.training.goal import Best, End
from p2pnode.training.layout import Layout
from p2pnode.training.trainer_link.interface import ModelDescription, Vector

#: Longest waits for final values and for the buffers of another node. A dead owner is replaced within ten seconds.
FINAL_VALUES_S = 60.0
BUFFERS_S = 30.0
#: Most tensors that a sentence names.
NAMED_TENSORS = 3
_BUFFERS = msgspec.msgpack.Decoder(dict[str, bytes])


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended. `model`: the path of the model's file, and `sha256` its digest; empty if none was written.

    `why_differs`: why another node's file may differ; empty if all nodes that finish write the same bytes.
    `first_step`: the step that the run had reached when this node started.
    """

    end: End
    step: int
    model: str
    sha256: str
    why_differs: str
    best: Best | None = None
    first_step: int = 0

    @property
    def how_to_load(self) -> list[str]:
        """Two lines of Python for a `model` of the same architecture; none without a file."""
        if not self.model:
            return []
        if self.model.endswith(SAFETENSORS):
            return [
                "from safetensors.torch import load_file",
                f"model.load_state_dict(load_file({self.model!r}))",
            ]
        return ["import torch", f"model.load_state_dict(torch.load({self.model!r}, weights_only=True))"]

    def lines(self) -> list[str]:
        """The result in sentences, for people."""
        found = [f"the run has ended after {self.step} steps ({self.end})"]
        if self.end == "max_steps" and 0 < self.step <= self.first_step:
            found.append(
                "it had them before this start, which trained nothing: raise training.max_steps to go on, or begin "
                "anew with another --run or after `p2pnode forget`"
            )
        if self.best is not None:
            found.append(f"best {self.best.metric}: {self.best.value:.6g}, at step {self.best.step}")
        if self.model:
            found += [f"the model is in {self.model}; load it with", *(f"    {line}" for line in self.how_to_load)]
        else:
            found.append("no file of the model was written")
        if self.why_differs:
            found.append(f"it may differ from the model of other nodes: {self.why_differs}")
        return found


@dataclass(eq=False)
class RunEnding(NodePart):
    """Brings one node to the model that all nodes share at the end, and writes it."""

    export: ModelExport

    async def conclude(
        self,
        end: End,
        exchange: Exchange,
        layout: Layout,
        vector: Vector,
        still_training: int,
        description: ModelDescription | None = None,
    ) -> RunResult:
        """Get the final values into `vector`, `float32[total]`, write the file, and return the result.

        `still_training`: other nodes that train on. Without a `description` the trainer is asked for one.
        """
        step, model, sha256 = self.progress.step, "", ""
        nodes = "node trains" if still_training == 1 else "nodes train"
        reasons = [f"{still_training} {nodes} on"] if still_training else []
        if missing := (await exchange.pull_final(step, FINAL_VALUES_S)).missing:
            reasons.append(f"{len(missing)} shards had no final value within {FINAL_VALUES_S:.0f} s")
        description = description or await self.export.describe_last()
        if description is None or not description.tensors:
            reasons.append("the trainer has not described its model")
        else:
            description = await self._with_agreed_buffers(description, exchange, reasons)
            if self.config.training.export:
                model, sha256 = await self._write(step, description, layout, vector)
        why_differs = "; ".join(reasons)
        if why_differs:
            self.log.warning("model_may_differ", reason=why_differs)
        return RunResult(end, step, model, sha256, why_differs)

    async def _with_agreed_buffers(
        self, description: ModelDescription, exchange: Exchange, reasons: list[str]
    ) -> ModelDescription:
        """The description with the buffers that all nodes take; why not, where they take none, goes into `reasons`.

        A node without buffers asks too, if it has fixed tensors: training may have changed them on another node.
        """
        if all(source.kind == "vector" for source in description.tensors):
            return description
        mine = msgspec.msgpack.encode(dict(sorted(description.local.items())))
        if len(mine) > MAX_BUFFERS_BYTES:
            named = _named(sorted(description.local, key=lambda name: (-len(description.local[name]), name)))
            reasons.append(
                f"its own tensors ({named}) have {len(mine)} bytes; at most {MAX_BUFFERS_BYTES} are exchanged"
            )
            return description
        agreed = await exchange.final_values.agree_on_buffers(mine, BUFFERS_S)
        if agreed is None:
            if description.local:
                named = _named(sorted(description.local))
                reasons.append(f"its own tensors ({named}) are this node's: no other node has sent any")
            return description
        try:
            local = _BUFFERS.decode(agreed)
        except msgspec.DecodeError:
            local = {}
        ours, theirs = ({name: len(raw) for name, raw in each.items()} for each in (description.local, local))
        if ours != theirs:
            known = sorted({source.source for source in description.tensors})  # a peer's names are not shown
            named = _named([name for name in known if ours.get(name) != theirs.get(name)])
            shown = f" ({named})" if named else ""
            reasons.append(f"training has changed tensors{shown} on some nodes, where they are each node's own")
            return description
        return msgspec.structs.replace(description, local=local)

    async def _write(self, step: int, description: ModelDescription, layout: Layout, vector: Vector) -> tuple[str, str]:
        """The path of the file and its SHA-256; both empty where it cannot be written."""
        try:
            model, sha256 = await self.export.write(description, layout, vector)
        except CannotExport as error:
            self.log.error("export_failed", reason=str(error))
            return "", ""
        self.log.info("exported", path=model, step=step, sha256=sha256)
        return model, sha256


def _named(names: list[str]) -> str:
    more = f" and {len(names) - NAMED_TENSORS} more" if len(names) > NAMED_TENSORS else ""
    return ", ".join(names[:NAMED_TENSORS]) + more
