"""Optimisers as other packages have them: with positions in their state, or with copies of the weights.

Small, and alike in what they keep where: the tests need none of the packages. The real ones were compared by hand where
they can be installed (docs/own-model.md has the versions).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

Parameters = Iterable[Tensor]


def _gradients(parameters: list[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(one) if one.grad is None else one.grad for one in parameters]


class SGDScheduleFree(Optimizer):
    """As that of `schedulefree` and `ScheduleFreeSGD` of `pytorch_optimizer`: y in the model, z in the state."""

    def __init__(self, parameters: Parameters, lr: float, beta: float = 0.9) -> None:
        defaults = {"lr": lr, "beta": beta, "train_mode": False, "weight_sum": 0.0, "lr_max": -1.0, "r": 0.0}
        super().__init__(parameters, defaults | {"weight_lr_power": 2.0})

    def _switch(self, *, training: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] == training:
                continue
            group["train_mode"] = training
            for parameter in group["params"]:
                if "z" in self.state[parameter]:
                    share = 1 - (group["beta"] if training else 1 / group["beta"])
                    parameter.detach().lerp_(self.state[parameter]["z"], share)

    def train(self) -> None:
        self._switch(training=True)

    def eval(self) -> None:
        self._switch(training=False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert group["train_mode"], "Optimizer was not in train mode when step is called."
            lr, beta = group["lr"], group["beta"]
            group["lr_max"] = max(lr, group["lr_max"])
            weight = group["lr_max"] ** 2
            group["weight_sum"] += weight
            share = weight / group["weight_sum"]
            for y, gradient in zip(group["params"], _gradients(group["params"]), strict=True):
                z = self.state[y].setdefault("z", y.clone())
                y.lerp_(z, share)
                y.add_(gradient, alpha=lr * (beta * (1 - share) - 1))
                z.sub_(gradient, alpha=lr)


class Lookahead(Optimizer):
    """As that of `pytorch_optimizer`: a wrapper, whose own state has the slow weights."""

    def __init__(self, optimizer: Optimizer, k: int = 5, alpha: float = 0.5) -> None:
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self._k, self._alpha = k, alpha
        for group in self.param_groups:
            group["counter"] = 0
            for parameter in group["params"]:
                self.state[parameter]["slow_params"] = parameter.detach().clone()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.optimizer.step()
        for group in self.param_groups:
            group["counter"] += 1
            for parameter in group["params"] if group["counter"] % self._k == 0 else ():
                slow = self.state[parameter]["slow_params"]
                parameter.lerp_(slow, 1 - self._alpha)
                slow.copy_(parameter)


class DualAveraging(Optimizer):
    """As MADGRAD of `timm`: where the weights were at first is in the state, and they are computed from it."""

    def __init__(self, parameters: Parameters, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "step": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] += 1
            rate = group["lr"] * group["step"] ** 0.5
            for x, gradient in zip(group["params"], _gradients(group["params"]), strict=True):
                state = self.state[x]
                if not state:
                    state |= {"x0": x.clone(), "s": torch.zeros_like(x), "v": torch.zeros_like(x)}
                state["s"].add_(gradient, alpha=rate)
                state["v"].addcmul_(gradient, gradient, value=rate)
                x.lerp_(state["x0"] - state["s"] / (state["v"].pow(1 / 3) + 1e-6), 0.1)


class Prodigy(Optimizer):
    """As that of `prodigyopt`: the rate is an estimate of the distance from where the weights were at first."""

    def __init__(self, parameters: Parameters, d0: float = 1e-4) -> None:
        super().__init__(parameters, {"lr": 1.0, "d": d0, "numerator": 0.0, "beta": 0.9995})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        (group,) = self.param_groups
        d, beta = group["d"], group["beta"]
        denominator = gained = 0.0
        for parameter, gradient in zip(group["params"], _gradients(group["params"]), strict=True):
            state = self.state[parameter]
            if not state:
                zeros = {name: torch.zeros_like(parameter) for name in ("s", "exp_avg", "exp_avg_sq")}
                state |= {"p0": parameter.clone(), **zeros}
            gained += d * float((gradient * (state["p0"] - parameter)).sum())
            state["exp_avg"].mul_(0.9).add_(gradient, alpha=0.1 * d)
            state["exp_avg_sq"].mul_(0.999).addcmul_(gradient, gradient, value=0.001 * d * d)
            state["s"].mul_(beta).add_(gradient, alpha=d)
            denominator += float(state["s"].abs().sum())
        group["numerator"] = beta * group["numerator"] + d * gained / d
        if denominator:
            group["d"] = max(d, group["numerator"] / denominator)
        for parameter in group["params"]:
            state = self.state[parameter]
            parameter.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt().add_(d * 1e-8), value=-d)


class Modes(AdamW):
    """As SPlus: two modes, of which nobody knows what they put into the model."""

    def train(self) -> None:
        pass

    def eval(self) -> None:
        pass


# --- copies of the weights --------------------------------------------------------------------------------------


class FusedMasters(Optimizer):
    """As FusedAdam of Apex with `master_weights`: its groups have the parameters, a list beside them the copies."""

    def __init__(self, parameters: Parameters, make: Callable[[list[Tensor]], Optimizer]) -> None:
        super().__init__(parameters, {"lr": 0.005})
        parameters = self.param_groups[0]["params"]
        self.masters = [parameter.detach().float().clone() for parameter in parameters]
        self._inner = [make(self.masters)]  # in a list, as kernels are not found either

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = self.param_groups[0]["params"]
        for master, gradient in zip(self.masters, _gradients(parameters), strict=True):
            master.grad = gradient.float()
        self._inner[0].step()
        for parameter, master in zip(parameters, self.masters, strict=True):
            parameter.copy_(master)

    @torch.no_grad()
    def copy_in(self) -> None:
        for parameter, master in zip(self.param_groups[0]["params"], self.masters, strict=True):
            master.copy_(parameter)


class OffloadedMasters(FusedMasters):
    """As an optimiser on the host: the copies are in no tensor of torch while the model is loaded."""

    def __init__(self, parameters: Parameters, make: Callable[[list[Tensor]], Optimizer]) -> None:
        super().__init__(parameters, make)
        self._kept = [master.numpy().copy() for master in self.masters]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for master, kept in zip(self.masters, self._kept, strict=True):
            master.copy_(torch.from_numpy(kept))
        super().step()
        self._kept = [master.numpy().copy() for master in self.masters]

    @torch.no_grad()
    def copy_in(self) -> None:
        for parameter, kept in zip(self.param_groups[0]["params"], self._kept, strict=True):
            kept[...] = parameter.float().numpy()


class Float16WithMasters:
    """As Megatron's `Float16OptimizerWithFloat16Params`: a wrapper whose groups have the copies."""

    def __init__(self, parameters: Parameters, make: Callable[[list[Tensor]], Optimizer]) -> None:
        self.float16_groups = [list(parameters)]
        masters = [parameter.detach().float().clone() for parameter in self.float16_groups[0]]
        self.fp32_from_float16_groups = [masters]
        self.optimizer = make(masters)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict(), "fp32_from_fp16_params": self.fp32_from_float16_groups}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        for masters, saved in zip(self.fp32_from_float16_groups, state["fp32_from_fp16_params"], strict=True):
            for master, value in zip(masters, saved, strict=True):
                master.copy_(value)

    def zero_grad(self) -> None:
        for parameter in self.float16_groups[0]:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        (parameters,), (masters,) = self.float16_groups, self.fp32_from_float16_groups
        for master, gradient in zip(masters, _gradients(parameters), strict=True):
            master.grad = gradient.float()
        self.optimizer.step()
        for parameter, master in zip(parameters, masters, strict=True):
            parameter.copy_(master)

    @torch.no_grad()
    def copy_in(self) -> None:
        for parameter, master in zip(self.float16_groups[0], self.fp32_from_float16_groups[0], strict=True):
            master.copy_(parameter)


class FlatPartition:
    """As ZeRO 1 and 2 of DeepSpeed: one flat copy, and the parameters are views of another flat tensor."""

    def __init__(self, parameters: Parameters, make: Callable[[list[Tensor]], Optimizer]) -> None:
        self.bit16_groups = [list(parameters)]
        self.bit16_groups_flat = [torch.cat([parameter.detach().reshape(-1) for parameter in self.bit16_groups[0]])]
        parts = self.bit16_groups_flat[0].split([parameter.numel() for parameter in self.bit16_groups[0]])
        for parameter, part in zip(self.bit16_groups[0], parts, strict=True):
            parameter.data = part.view(parameter.shape)
        self.single_partition_of_fp32_groups = [self.bit16_groups_flat[0].float().clone()]
        self.optimizer = make(self.single_partition_of_fp32_groups)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)

    def zero_grad(self) -> None:
        for parameter in self.bit16_groups[0]:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        (flat,), (master,) = self.bit16_groups_flat, self.single_partition_of_fp32_groups
        master.grad = torch.cat([gradient.reshape(-1).float() for gradient in _gradients(self.bit16_groups[0])])
        self.optimizer.step()
        flat.copy_(master)

    @torch.no_grad()
    def copy_in(self) -> None:
        self.single_partition_of_fp32_groups[0].copy_(self.bit16_groups_flat[0])


#: What has copies of the weights, by whether its groups have the parameters.
COPYING = {True: (FusedMasters, OffloadedMasters), False: (Float16WithMasters, FlatPartition)}
