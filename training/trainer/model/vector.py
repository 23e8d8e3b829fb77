"""Maps a model to a vector: selects its tensors, loads the vector into them, and computes the delta of training.

The vector holds the trainable parameters, tied ones once, sorted by name without the wrappers' prefixes, and then the
persistent floating-point buffers. Frozen parameters, buffers with values that are not finite (masks), and tables of
integers are left out and covered by a digest; counters stay local (`training.trainer.model.unshared_tensors`). The base
of a delta is rounded to the model's own dtype, so that rounding is never pushed.

Of several ranks each maps the whole vector, and reads and writes its own parts (`training.trainer.model.local_part`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from p2pnode.training.files.model_file import tensors_digest
from p2pnode.training.layout import Kind, Layout, LayoutEntry
from p2pnode.training.shards.robust import norm_of
from p2pnode.training.trainer.model.local_part import LocalPart, is_distributed, local_of, reshards
from p2pnode.training.trainer.model.unshared_tensors import UnsharedTensors, is_averaged, is_finite
from p2pnode.training.trainer_link.interface import TrainerFailed, Vector

#: Parts of names that wrappers insert: `torch.compile`, activation checkpointing.
_WRAPPER_PARTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})

#: Types that hold the vector's values as they are.
EXACT = (torch.float32, torch.float64)
#: Values that are copied between host and device, and worked on, at a time: 64 MB.
CHUNK = 1 << 24


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

    def __init__(
        self,
        model: nn.Module,
        *,
        include_frozen: bool = False,
        rank: int = 0,
        ranks: int = 1,
        chunk: int = CHUNK,
    ) -> None:
        """Of `ranks`, each writes its part of the parameters that all hold. `chunk`: values that pass between host and
        device at a time. All ranks have to call this."""
        _refuse_sharded(model)
        self._reshards = reshards(model)
        self.reshard()
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
        self._buffer_names = {name for name, _ in _named_buffers(model)}
        shared = sorted(parameters.items()) + sorted(buffers.items())
        self._tensors = [tensor for _, tensor in shared]
        self.layout = _layout(shared, len(parameters))
        self._parts = [
            LocalPart.of(entry.name, tensor, writes_plain=_writer(entry, self.layout, ranks) == rank)
            for entry, tensor in zip(self.layout.entries, self._tensors, strict=True)
        ]
        #: What training is not to change, by canonical name: frozen parameters, masks, tables of integers.
        self.fixed = frozen | constant
        self.unshared = UnsharedTensors(self.local_buffers, self.fixed)
        #: A fingerprint of each of them, for messages.
        self.frozen = self.unshared.fingerprints
        self.frozen_digest = tensors_digest(self.frozen)
        self._chunk = chunk
        tensors = self.tensors
        #: Where the first of the tensors is.
        self.device = tensors[0].device
        #: Whether all of them are in the host's memory.
        self.is_on_host = all(tensor.device.type == "cpu" for tensor in tensors)
        # Beside tensors of half the size, or of several devices, it would fill a device: it passes by in chunks.
        fits = all(tensor.dtype in EXACT and tensor.device == self.device for tensor in tensors)
        base_device = self.device if fits else torch.device("cpu")
        size = sum(tensor.numel() for tensor in tensors)
        self._base = torch.zeros(size, dtype=torch.float32, device=base_device)
        self._has_all = size == self.layout.total
        # A delta that is kept on the device; allocated by the first `keep_delta`.
        self._kept: Tensor | None = None
        # What the base has and the shared value lacks, `float32[total]`.
        self._ahead: Tensor | None = None
        #: The same of earlier deltas, which the shared value that entered last lacked. On the CPU.
        self._added: Tensor | None = None

    def reshard(self) -> None:
        """Let the modules of `fully_shard` hold their sharded parameters."""
        for reshard in self._reshards:
            reshard()

    def follow_buffers(self, model: nn.Module) -> list[str]:
        """Take the tensors that the buffers are now: a module may assign a new one. Returns the names of persistent
        buffers that are new. Raises `TrainerFailed` for one of another shape, type or device, or that is gone."""
        now = dict(_named_buffers(model))
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
        for known in (self.fixed, self.local_buffers):
            known.update({name: now[name] for name in known if name in now})
        return [name for name in now if name not in self._buffer_names]

    @property
    def tensors(self) -> list[Tensor]:
        """What this rank holds of the model's tensors, in the vector's order."""
        return [local_of(tensor) for tensor in self._tensors]

    @property
    def spread(self) -> list[Tensor]:
        """The model's tensors of which ranks hold parts, shared or fixed."""
        return list(filter(is_distributed, [*self._tensors, *self.fixed.values()]))

    @property
    def replicated(self) -> list[Tensor]:
        """The parameters that all ranks hold."""
        return [
            tensor
            for entry, tensor in zip(self.layout.entries, self._tensors, strict=True)
            if entry.kind == "parameter" and not is_distributed(tensor)
        ]

    def named_tensors(self) -> list[tuple[str, Tensor]]:
        """The model's tensors that the vector holds, each with the name of its entry."""
        return [(entry.name, tensor) for entry, tensor in zip(self.layout.entries, self._tensors, strict=True)]

    def _pieces(self, *vectors: Tensor, writes: bool = False) -> Iterator[tuple[Tensor, ...]]:
        """What this rank holds of the tensors, each with its base, and its place in each of these vectors,
        `[total]`; the large ones in pieces. With `writes` only what this rank writes."""
        first = 0
        for tensor, entry, part in zip(self.tensors, self.layout.entries, self._parts, strict=True):
            base = self._base[first : first + tensor.numel()].view(tensor.shape)
            first += tensor.numel()
            if part.writes or not writes:
                places = [_place(vector, entry, part) for vector in vectors]
                yield from _pieces_of((tensor, base, *places), self._chunk)

    def _finish(self) -> None:
        """Wait for copies to and from the host's memory."""
        for device in {tensor.device for tensor in self._tensors}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def parts_of(self, vector: Vector) -> list[Tensor]:
        """`float32[total]` in parts like the tensors, each on the device of its tensor."""
        flat = torch.from_numpy(vector)
        return [
            _place(flat, entry, part).to(tensor.device)
            for tensor, entry, part in zip(self.tensors, self.layout.entries, self._parts, strict=True)
        ]

    @property
    def gpus(self) -> dict[str, str]:
        """What the driver calls each CUDA device of the tensors, by its name here."""
        devices = {tensor.device for tensor in self.tensors if tensor.is_cuda}
        return {str(device): f"GPU-{torch.cuda.get_device_properties(device).uuid}" for device in devices}

    @property
    def device_bytes(self) -> int:
        """What the base takes of a device's memory."""
        return 0 if self._base.device.type == "cpu" else self._base.numel() * self._base.element_size()

    def on_host(self) -> list[Tensor]:
        """What it keeps in the host's memory for tensors of other devices."""
        return [self._base] if not self.is_on_host and self._base.device.type == "cpu" else []

    @torch.no_grad()
    def read(self, into: Vector) -> None:
        """Write the model's values into `into`, `float32[total]`."""
        for tensor, _, place in self._pieces(torch.from_numpy(into), writes=True):
            place.copy_(tensor, non_blocking=True)
        self._finish()

    @torch.no_grad()
    def load(self, vector: Vector) -> None:
        """Load `vector`, `float32[total]`, into the model: it is the base, as rounded to the model's own types."""
        self._ahead = self._added = None
        for _, base, place in self._pieces(torch.from_numpy(vector)):
            base.copy_(place, non_blocking=True)
        self.load_base()

    @torch.no_grad()
    def load_base(self) -> None:
        """Load the base into the model: there is no progress then."""
        self.reshard()
        for tensor, base in self._pieces():
            tensor.copy_(base, non_blocking=True)
            if tensor.dtype not in EXACT:
                base.copy_(tensor, non_blocking=True)
        self._finish()

    @torch.no_grad()
    def cut(self, into: Vector) -> float:
        """Write the progress into `into`, `float32[total]`, and change nothing. Returns the length of what this rank
        has written, which is not finite where a value is not."""
        lengths: list[float | Tensor] = []
        for tensor, base, place in self._pieces(torch.from_numpy(into), writes=True):
            if self.is_on_host and tensor.dtype == torch.float32:
                torch.sub(tensor, base, out=place)
                lengths.append(norm_of(place.reshape(-1).numpy()))
                continue
            found = torch.sub(tensor.to(torch.float32), _near(base, tensor))
            place.copy_(found, non_blocking=True)
            lengths.append(torch.linalg.vector_norm(found, dtype=torch.float64))
        self._finish()
        return math.hypot(*map(float, lengths))

    @torch.no_grad()
    def add_to_base(self, encoded: Tensor) -> None:
        """So much of the progress, `float32[total]`, goes to the owners: it is in the base now. `encoded` must not
        change before the next `enter`."""
        self._move_base(encoded, 1)
        self._ahead = encoded

    @torch.no_grad()
    def take_back(self, part: Tensor) -> None:
        """So much of what was added to the base was not sent after all, `float32[total]`: it is progress again."""
        self._move_base(part, -1)
        self._ahead = None if self._ahead is None else self._ahead - part

    def _move_base(self, by: Tensor, sign: int) -> None:
        # Where this rank holds all of it the base is laid out as the vector.
        whole = zip(self._base.split(self._chunk), by.split(self._chunk), strict=True)  # type: ignore[no-untyped-call]
        for base, place in whole if self._has_all else ((base, place) for _, base, place in self._pieces(by)):
            base.add_(_near(place, base), alpha=sign)
        self._finish()

    @torch.no_grad()
    def enter(self, vector: Tensor, added: Tensor | None = None, keeps_base: Tensor | None = None) -> None:
        """Move base and model to where the base is `vector`, `float32[total]`, plus `added`: a delta of this node,
        where the shared value lacks it, on the CPU, and zero elsewhere; it must not change before the next `enter`.
        Where `keeps_base`, `bool[total]`, is true the base stays.

        What rounding takes from the move in a model of half precision stays out of the progress: pushed, it would pull
        the shared values to the few that the type has."""
        self.reshard()
        if keeps_base is not None:
            added = torch.where(keeps_base, self._lacking(), 0.0 if added is None else added)
        self._ahead, self._added = None, None if added is None or not added.any() else added
        given = [one for one in (added, keeps_base) if one is not None]
        for tensor, base, shared, *places in self._pieces(vector, *given):
            value = _near(shared, tensor)
            if added is not None:
                own = _near(places[0], tensor)
                value = torch.where(own == 0, value, value + own)
            if keeps_base is not None:
                value = torch.where(_near(places[-1], tensor), _near(base, tensor), value)
            if tensor.dtype == torch.float32 and tensor.device == base.device:
                torch.sub(tensor, base, out=base)  # the progress; without a copy of a large model
                torch.add(base, value, out=tensor)
                base.copy_(value)
                continue
            progress = tensor.to(torch.float32) - _near(base, tensor)
            tensor.copy_(value + progress)
            moved = value if tensor.dtype in EXACT else tensor.to(torch.float32) - progress
            base.copy_(moved, non_blocking=True)
        self._finish()

    @torch.no_grad()
    def load_shared(self) -> None:
        """Load the shared value that this node knows: the base without what that value lacks, to the rounding of one
        addition or two."""
        self.reshard()
        for tensor, base, *parts in self._pieces(*(one for one in (self._ahead, self._added) if one is not None)):
            value = _near(base, tensor)
            for part in parts:
                value = torch.sub(value, _near(part, tensor))
            tensor.copy_(value)

    def _lacking(self) -> Tensor:
        found = torch.zeros(self.layout.total)
        for one in (self._ahead, self._added):
            if one is not None:
                found += one
        return found

    @property
    def is_ahead(self) -> bool:
        """Whether the base has a delta that the shared value lacks."""
        return self._ahead is not None or self._added is not None

    # --- one of several trainers of a node ------------------------------------------------------------------------

    @torch.no_grad()
    def load_at_delta(self, vector: Vector, delta: Vector) -> None:
        """Load `vector + delta`, both `float32[total]`, which is the base then. A delta that is not finite is left
        out: no owner adds it. `delta` must not change before the next load."""
        own = torch.from_numpy(delta)
        self.load(vector)
        if is_finite(own):
            self.add_to_base(own)
            self.load_base()

    @torch.no_grad()
    def keep_delta(self) -> bool:
        """As `cut`, but on the model's device, in `kept`; whether all values are finite."""
        if self._kept is None:
            self._kept = torch.empty(self.layout.total, dtype=torch.float32, device=self.device)
        for tensor, base, place in self._pieces(self._kept):
            place.copy_(torch.sub(tensor.to(torch.float32), _near(base, tensor)))
        return bool(torch.isfinite(self._kept).all())

    @property
    def kept(self) -> Tensor:
        """What `keep_delta` has kept, `float32[total]` on the model's device; it must not be changed."""
        assert self._kept is not None
        return self._kept

    @torch.no_grad()
    def go_on(self, by: Tensor) -> None:
        """Begin at the last base plus `by`, `float32[total]`."""
        self._move_base(by, 1)
        self.load_base()

    @torch.no_grad()
    def keep(self) -> list[Tensor]:
        """A copy of the model's values, for `put_back`."""
        return [tensor.clone() for tensor in self.tensors]

    @torch.no_grad()
    def put_back(self, kept: list[Tensor]) -> None:
        """Give the model the values that `keep` returned."""
        self.reshard()
        for tensor, value in zip(self.tensors, kept, strict=True):
            tensor.copy_(value)

    @property
    def base(self) -> Tensor:
        """The base of what this rank holds, `float32[n]`."""
        return self._base


def _writer(entry: LayoutEntry, layout: Layout, ranks: int) -> int:
    """The rank that writes what all hold. Buffers are those of rank 0, as in DistributedDataParallel."""
    return entry.offset * ranks // layout.total if entry.kind == "parameter" else 0


def _place(vector: Tensor, entry: LayoutEntry, part: LocalPart) -> Tensor:
    """Where a part is in `[total]`."""
    place = vector[entry.offset : entry.offset + entry.size].view(entry.shape)
    return place[part.box] if part.box else place


def _pieces_of(alike: tuple[Tensor, ...], chunk: int) -> Iterator[tuple[Tensor, ...]]:
    """Tensors of one shape in pieces of at most `chunk` values."""
    count, shape = alike[0].numel(), alike[0].shape
    if count <= chunk:
        yield alike
        return
    rows = max(1, chunk * shape[0] // count)
    for first in range(0, shape[0], rows):
        pieces = tuple(one[first : first + rows] for one in alike)
        if pieces[0].numel() > chunk:  # a row is too long
            yield from _pieces_of(tuple(piece[0] for piece in pieces), chunk)
        else:
            yield pieces


def _near(part: Tensor, tensor: Tensor) -> Tensor:
    """The part on the device of the tensor; from registered memory of the host it comes while the device works."""
    return part.to(tensor.device, non_blocking=True)


def storage_key(tensor: Tensor) -> tuple[object, ...]:
    """Equal for two tensors that are the same values in the same memory, as tied ones are."""
    local = local_of(tensor)
    return (
        str(local.device),
        local.untyped_storage().data_ptr() or id(tensor),  # an empty part has no memory
        local.storage_offset(),
        tuple(tensor.shape),
        local.stride(),
    )


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """All parameters by canonical name, tied ones under each of their names."""
    return ((canonical_name(name), value) for name, value in model.named_parameters(remove_duplicate=False))


def _named_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The persistent buffers by canonical name."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        volatile = module._non_persistent_buffers_set  # noqa: SLF001 - torch has no public accessor
        for name, buffer in module.named_buffers(recurse=False):
            if name not in volatile:
                yield canonical_name(f"{prefix}.{name}".removeprefix(".")), buffer


def _parameters(model: nn.Module, *, include_frozen: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What the vector holds of the parameters, and what not, by canonical name, tied ones under the first of their
    names."""
    trainable: dict[str, Tensor] = {}
    frozen: dict[str, Tensor] = {}
    known: set[tuple[object, ...]] = set()
    # Trainable ones first: a tensor tied to a frozen name is still trained.
    for name, parameter in sorted(named_parameters(model), key=lambda item: (not item[1].requires_grad, item[0])):
        _refuse_unusable(name, parameter)
        storage = storage_key(parameter)
        if storage in known:
            continue
        known.add(storage)
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


def _buffers(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Persistent buffers by canonical name: shared ones, constant ones (not finite, and tables of integers), and this
    node's own (counters)."""
    shared: dict[str, Tensor] = {}
    constant: dict[str, Tensor] = {}
    local: dict[str, Tensor] = {}
    known: set[tuple[object, ...]] = set()
    for name, buffer in sorted(_named_buffers(model), key=lambda item: item[0]):
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


def _layout(named: list[tuple[str, Tensor]], parameters: int) -> Layout:
    """Of tensors in the vector's order, of which the first are the parameters."""
    entries, offset = [], 0
    for number, (name, tensor) in enumerate(named):
        kind: Kind = "parameter" if number < parameters else "buffer"
        entries.append(LayoutEntry(name, tuple(tensor.shape), dtype_name(tensor), kind, offset, tensor.numel()))
        offset += tensor.numel()
    return Layout(tuple(entries))


def dtype_name(tensor: Tensor) -> str:
    """As "float32"."""
    return str(tensor.dtype).removeprefix("torch.")


def _refuse_sharded(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise TrainerFailed(
                f"{name or 'the model'} is wrapped in FullyShardedDataParallel, which keeps parts of no known place",
                "use fully_shard (FSDP2), which replaces it: docs/frameworks.md",
                fatal=True,
            )


def _refuse_unusable(name: str, parameter: Tensor) -> None:
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
