"""Maps a model to a vector: selects its tensors, loads the vector into them, and computes the delta of training.

The vector holds the trainable parameters, tied ones once, sorted by name without the wrappers' prefixes, and then the
persistent floating-point buffers. Frozen parameters, buffers with values that are not finite (masks), and tables of
integers are left out and covered by a digest; counters stay local (`training.trainer.model.unshared_tensors`). The base
of a delta is rounded to the model's own dtype, so that rounding is never pushed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn

from p2pnode.training.files.model_file import digest_head
from p2pnode.training.layout import Layout, LayoutEntry
from p2pnode.training.trainer.model.unshared_tensors import UnsharedTensors, is_averaged, is_finite
from p2pnode.training.trainer_link.interface import TrainerFailed, Vector

#: Parts of names that wrappers insert: `torch.compile`, activation checkpointing.
_WRAPPER_PARTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})


def canonical_name(name: str) -> str:
    """The tensor's name in the bare model."""
    parts = [part for part in name.split(".") if part not in _WRAPPER_PARTS]
    while len(parts) > 1 and parts[0] == "module":  # DataParallel and DistributedDataParallel
        del parts[0]
    return ".".join(parts)


def bare_model(model: nn.Module) -> nn.Module:
    """The model inside the wrappers around it."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


class ModelVector:
    """The model's tensors in the vector's order. Raises `TrainerFailed` for a model that cannot be shared.

    The model is `base + progress`, and the base is `shared + ahead`: the shared value that this node knows, and its own
    deltas that are not in that value. Progress goes out with the next delta. A value that arrives moves model and base,
    and leaves progress and the optimiser's moments as they are (`enter`). With `include_frozen` frozen parameters are
    in the vector too, so that they may be unfrozen at any step.
    """

    def __init__(self, model: nn.Module, *, include_frozen: bool = False) -> None:
        _refuse_sharded(model)
        parameters, frozen = _parameters(model, include_frozen=include_frozen)
        if not parameters:
            raise TrainerFailed(
                "the model has no trainable parameter",
                "set requires_grad of the parameters to be trained before the optimiser is made"
                if frozen
                else "it has no parameter at all; PyTorch sees modules in an nn.ModuleList, but not in a plain list",
                fatal=True,
            )
        buffers, constant, self.local_buffers = _buffers(model)
        self._buffer_names = {canonical_name(name) for name, _ in _named(model, "buffers")}
        named = [("parameter", item) for item in sorted(parameters.items())]
        named += [("buffer", item) for item in sorted(buffers.items())]
        self.layout = _layout(named)
        #: What training is not to change, by canonical name: frozen parameters, masks, tables of integers.
        self.fixed = frozen | constant
        self.frozen_digest = tensors_digest(sorted(self.fixed.items()))
        self.unshared = UnsharedTensors(self.local_buffers, self.fixed)
        #: A fingerprint of each of them, for messages.
        self.frozen = self.unshared.fingerprints
        self._tensors = [tensor for _, (_, tensor) in named]
        self._base = torch.zeros(self.layout.total, dtype=torch.float32, device=self._tensors[0].device)
        self._bases = self._views(self._base)
        # A delta that is kept on the device; allocated by the first `keep_delta`.
        self._kept: Tensor | None = None
        # What the base has and the shared value lacks, in parts like the tensors; empty: nothing.
        self._ahead: list[Tensor] = []
        #: The same of an earlier delta, which the shared value that entered last lacked. On the CPU.
        self._lacking: list[Tensor] = []
        self._rounded = self._find_rounded()

    def _find_rounded(self) -> list[tuple[Tensor, Tensor]]:
        return [
            (tensor, base)
            for tensor, base in zip(self._tensors, self._bases, strict=True)
            if tensor.dtype not in (torch.float32, torch.float64)
        ]

    def follow_buffers(self, model: nn.Module) -> list[str]:
        """Take the tensors that the buffers are now: a module may assign a new one. Returns the names of persistent
        buffers that are new. Raises `TrainerFailed` for one of another shape, type or device, or that is gone."""
        now = {canonical_name(name): buffer for name, buffer in _named(model, "buffers")}
        for index, entry in enumerate(self.layout.entries):
            if entry.kind != "buffer":
                continue
            before, buffer = self._tensors[index], now.get(entry.name)
            facts = (before.shape, before.dtype, before.device)
            if buffer is None or (buffer.shape, buffer.dtype, buffer.device) != facts:
                raise TrainerFailed(
                    f"the buffer {entry.name} has another shape, type or device than it had, or is gone",
                    "change the model before p2pnode.attach()",
                    fatal=True,
                )
            self._tensors[index] = buffer
        self._rounded = self._find_rounded()
        for known in (self.fixed, self.local_buffers):
            known.update({name: now[name] for name in known if name in now})
        return [name for name in now if name not in self._buffer_names]

    @property
    def tensors(self) -> list[Tensor]:
        """The model's tensors in the vector's order."""
        return list(self._tensors)

    @property
    def parameters(self) -> list[Tensor]:
        """Those of them that are no buffers."""
        return [
            tensor
            for entry, tensor in zip(self.layout.entries, self._tensors, strict=True)
            if entry.kind == "parameter"
        ]

    def named_tensors(self) -> list[tuple[str, Tensor]]:
        """The model's tensors that the vector holds, each with the name of its entry."""
        return [(entry.name, tensor) for entry, tensor in zip(self.layout.entries, self._tensors, strict=True)]

    def _views(self, flat: Tensor) -> list[Tensor]:
        return [flat[entry.offset : entry.offset + entry.size].view(entry.shape) for entry in self.layout.entries]

    def parts_of(self, vector: Vector) -> list[Tensor]:
        """`float32[total]` in parts like the tensors, on the device of the model."""
        return self._views(torch.from_numpy(vector).to(self._base.device))

    @torch.no_grad()
    def read(self, into: Vector) -> None:
        """Write the model's values into `into`, `float32[total]`."""
        for tensor, view in zip(self._tensors, self._views(torch.from_numpy(into)), strict=True):
            view.copy_(tensor)

    @torch.no_grad()
    def load(self, vector: Vector) -> None:
        """Load `vector`, `float32[total]`, into the model: it is the base, as rounded to the model's own types."""
        self._ahead, self._lacking = [], []
        self._base.copy_(torch.from_numpy(vector))
        self.load_base()

    @torch.no_grad()
    def load_base(self) -> None:
        """Load the base into the model: there is no progress then."""
        for tensor, base in zip(self._tensors, self._bases, strict=True):
            tensor.copy_(base)
        for tensor, base in self._rounded:
            base.copy_(tensor)

    @torch.no_grad()
    def cut(self, into: Vector) -> None:
        """Write the progress into `into`, `float32[total]`, and change nothing."""
        shared = torch.from_numpy(into)
        for tensor, base, part in zip(self._tensors, self._bases, self._views(shared), strict=True):
            if tensor.dtype == torch.float32 and tensor.device == part.device:
                torch.sub(tensor, base, out=part)
            else:
                part.copy_(torch.sub(tensor.to(base.device, torch.float32), base))

    @torch.no_grad()
    def settle(self, sent: Tensor) -> None:
        """So much of the progress, `float32[total]` on the model's device, is on its way to the owners: it is in the
        base now. `sent` must not change before the next `enter`."""
        self._base.add_(sent)
        self._ahead = self._views(sent)

    @torch.no_grad()
    def take_back(self, part: Tensor) -> None:
        """So much of what was settled was not sent after all, `float32[total]`: it is progress again."""
        self._base.sub_(part)
        self._ahead = []

    @torch.no_grad()
    def enter(self, target: Tensor, lacking: Tensor | None = None) -> None:
        """Move base and model to where the base is `target`, `float32[total]` on the model's device. `lacking`: what in
        it is a delta of this node that the shared value lacks, on the CPU; it must not change before the next `enter`.

        What rounding takes from the move in a model of half precision stays out of the progress: pushed, it would pull
        the shared values to the few that the type has."""
        self._ahead, self._lacking = [], [] if lacking is None else self._views(lacking)
        for tensor, base, value in zip(self._tensors, self._bases, self._views(target), strict=True):
            if tensor.dtype == torch.float32 and tensor.device == base.device:
                torch.sub(tensor, base, out=base)  # the progress; without a copy of a large model
                torch.add(base, value, out=tensor)
                base.copy_(value)
                continue
            progress = tensor.to(base.device, torch.float32) - base
            base.copy_(value)
            tensor.copy_(base + progress)
            if tensor.dtype != torch.float64:
                torch.sub(tensor.to(base.device, torch.float32), progress, out=base)

    @torch.no_grad()
    def load_shared(self) -> None:
        """Load the shared value that this node knows: the base without what that value lacks, to the rounding of one
        addition or two."""
        for place, (tensor, base) in enumerate(zip(self._tensors, self._bases, strict=True)):
            value = base
            for parts in filter(None, (self._ahead, self._lacking)):
                value = torch.sub(value, parts[place].to(base.device))
            tensor.copy_(value)

    @property
    def is_ahead(self) -> bool:
        """Whether the base has a delta that the shared value lacks."""
        return bool(self._ahead or self._lacking)

    # --- one of several trainers of a node ------------------------------------------------------------------------

    @torch.no_grad()
    def load_at_delta(self, vector: Vector, delta: Vector) -> None:
        """Load `vector + delta`, both `float32[total]`, which is the base then. A delta that is not finite is left
        out: no owner adds it. `delta` must not change before the next load."""
        own = torch.from_numpy(delta)
        self.load(vector)
        if is_finite(own):
            self._base.add_(own.to(self._base.device))
            self._ahead = self._views(own)
            self.load_base()

    @torch.no_grad()
    def keep_delta(self) -> bool:
        """As `cut`, but on the model's device, in `kept`; whether all values are finite."""
        if self._kept is None:
            self._kept = torch.empty_like(self._base)
        for tensor, base, part in zip(self._tensors, self._bases, self._views(self._kept), strict=True):
            torch.sub(tensor.to(base.device, torch.float32), base, out=part)
        return bool(torch.isfinite(self._kept).all())

    @property
    def kept(self) -> Tensor:
        """What `keep_delta` has kept, `float32[total]` on the model's device; it must not be changed."""
        assert self._kept is not None
        return self._kept

    @torch.no_grad()
    def go_on(self, by: Tensor) -> None:
        """Begin at the last base plus `by`, `float32[total]` on its device."""
        self._base.add_(by)
        self.load_base()

    @torch.no_grad()
    def keep(self) -> list[Tensor]:
        """A copy of the model's values, for `put_back`."""
        return [tensor.clone() for tensor in self._tensors]

    @torch.no_grad()
    def put_back(self, kept: list[Tensor]) -> None:
        """Give the model the values that `keep` returned."""
        for tensor, value in zip(self._tensors, kept, strict=True):
            tensor.copy_(value)

    @property
    def base(self) -> Tensor:
        """The base, `float32[total]` on the model's device, which rank 0 broadcasts."""
        return self._base


def storage_key(tensor: Tensor) -> tuple[object, ...]:
    """Equal for two tensors that are the same values in the same memory, as tied ones are."""
    return (
        str(tensor.device),
        tensor.untyped_storage().data_ptr(),
        tensor.storage_offset(),
        tuple(tensor.shape),
        tensor.stride(),
    )


def _parameters(model: nn.Module, *, include_frozen: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What the vector holds of the parameters, and what not, by canonical name, tied ones under the first of their
    names."""
    named = sorted((canonical_name(name), value) for name, value in _named(model, "parameters"))
    trainable: dict[str, Tensor] = {}
    frozen: dict[str, Tensor] = {}
    known: dict[tuple[object, ...], str] = {}
    # Trainable ones first: a tensor tied to a frozen name is still trained.
    for name, parameter in sorted(named, key=lambda item: not item[1].requires_grad):
        _refuse_unusable(name, parameter)
        storage = storage_key(parameter)
        if storage in known:
            continue
        known[storage] = name
        may_train = parameter.is_floating_point() and parameter.layout == torch.strided and parameter.numel()
        into = trainable if parameter.requires_grad or (include_frozen and may_train) else frozen
        if name in into:
            raise TrainerFailed(
                f"two parameters of the model share the name {name} once wrappers' prefixes are stripped",
                'rename one of them: "module" and "_orig_mod" are names that wrappers use',
                fatal=True,
            )
        into[name] = parameter
    return trainable, frozen


def _named(model: nn.Module, kind: Literal["parameters", "buffers"]) -> Iterator[tuple[str, Tensor]]:
    # `named_parameters` would keep the first name of tied parameters; the smallest is wanted.
    if kind == "parameters":
        yield from model.named_parameters(remove_duplicate=False)
        return
    for prefix, module in model.named_modules(remove_duplicate=False):
        volatile = module._non_persistent_buffers_set  # noqa: SLF001 - torch has no public accessor
        for name, buffer in module.named_buffers(recurse=False):
            if name not in volatile:
                yield (f"{prefix}.{name}" if prefix else name), buffer


def _buffers(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Persistent buffers by canonical name: shared ones, constant ones (not finite, and tables of integers), and this
    node's own (counters)."""
    shared: dict[str, Tensor] = {}
    constant: dict[str, Tensor] = {}
    local: dict[str, Tensor] = {}
    known: set[tuple[object, ...]] = set()
    for name, buffer in sorted((canonical_name(name), value) for name, value in _named(model, "buffers")):
        is_shared = is_averaged(name, buffer)
        if storage_key(buffer) in known:
            continue
        known.add(storage_key(buffer))
        if not is_shared:
            (local if buffer.numel() <= 1 else constant)[name] = buffer
        elif bool(torch.isfinite(buffer).all()):
            shared[name] = buffer
        else:
            constant[name] = buffer
    return shared, constant, local


def _layout(named: list[tuple[str, tuple[str, Tensor]]]) -> Layout:
    entries = []
    offset = 0
    for kind, (name, tensor) in named:
        dtype = dtype_name(tensor)
        shape = tuple(tensor.shape)
        entries.append(
            LayoutEntry(name, shape, dtype, "parameter" if kind == "parameter" else "buffer", offset, tensor.numel())
        )
        offset += tensor.numel()
    return Layout(tuple(entries))


def dtype_name(tensor: Tensor) -> str:
    """As "float32"."""
    return str(tensor.dtype).removeprefix("torch.")


def tensors_digest(named: list[tuple[str, Tensor]]) -> str:
    """Hex SHA-256 over names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name, tensor in named:
        digest.update(digest_head(name, dtype_name(tensor), tuple(tensor.shape)))
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _refuse_sharded(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise _sharded(name or "the model")


def _refuse_unusable(name: str, parameter: Tensor) -> None:
    kinds = {kind.__name__ for kind in type(parameter).__mro__}
    if "DTensor" in kinds or "DTensor" in {kind.__name__ for kind in type(parameter.data).__mro__}:
        raise _sharded(name)
    if hasattr(parameter, "ds_id"):
        raise TrainerFailed(
            f"the parameter {name} is partitioned by DeepSpeed (ZeRO-3), and a node needs the whole model",
            "use stage 1 or 2 with on_load (docs/own-model.md), or one p2pnode node per device",
            fatal=True,
        )
    if nn.parameter.is_lazy(parameter):
        raise TrainerFailed(f"the parameter {name} has no shape yet", "run one forward pass in build()", fatal=True)
    if parameter.is_meta:
        raise TrainerFailed(f"the parameter {name} is on the meta device", "give it values in build()", fatal=True)
    if parameter.requires_grad and not parameter.numel():
        raise TrainerFailed(f"the parameter {name} is empty", "freeze it, or give it values before", fatal=True)
    if parameter.requires_grad and not (parameter.is_floating_point() and parameter.layout == torch.strided):
        raise TrainerFailed(
            f"the parameter {name} is {parameter.dtype}, {parameter.layout}: only dense real numbers can be shared",
            "keep it as a real, dense parameter, or freeze it",
            fatal=True,
        )


def _sharded(name: str) -> TrainerFailed:
    return TrainerFailed(
        f"{name} is sharded over processes (FSDP or DTensor), and a trainer needs the whole model",
        "use DistributedDataParallel, or one p2pnode node per device",
        fatal=True,
    )
