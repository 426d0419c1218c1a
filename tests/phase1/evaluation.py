"""Bodies for task 1.12."""

from typing import Any

from judging.calls import refusal_of, returned
from judging.pretend_device import PretendDevice, devices_sent
from phase1.models import Moody, Saturated, Signs, Watched, classifier, state_of


def evaluate(
    lesson: Any, size: int, length: int = 0, given: dict[str, Any] | None = None, group: Any = None
) -> dict[str, Any]:
    """What comes back, and how data set and model were used; ``given`` are further arguments."""
    named = dict(given or {}) | ({} if group is None else {"group": group})
    return _evaluated(lesson, Moody(), Watched(size, length=length), named)


def evaluate_modes(lesson: Any, size: int, modes: list[bool]) -> dict[str, Any]:
    """Before the call, the modules are in these modes, one by one."""
    model = Moody()
    for module, mode in zip(model.modules(), modes, strict=True):
        module.training = mode
    return _evaluated(lesson, model, Watched(size), {})


def evaluate_there(lesson: Any, size: int) -> dict[str, Any]:
    """With the model on a device that is not there, and which devices sent tensors were on."""
    with PretendDevice() as device, devices_sent() as sent:
        data = Watched(size)
        found = _evaluated(lesson, Moody().to(device), data, {"device": str(device)})
    return {**found, "sent": sent, "device": str(device)}


def _evaluated(lesson: Any, model: Moody, data: Watched, given: dict[str, Any]) -> dict[str, Any]:
    modes, before = [module.training for module in model.modules()], state_of(model)
    found = returned("evaluate", lesson.evaluate(model, data, **given))
    values = [found.loss, found.accuracy, found.num_targets]
    return {
        "found": [float(value) for value in values],
        "types": [type(found).__name__, *(type(value).__name__ for value in values)],
        "fetched": data.fetched,
        "rows": model.notes.rows,
        "noted": sorted(model.notes.modes),
        "devices": sorted(model.notes.devices),
        "restored": modes == [module.training for module in model.modules()],
        "changed": state_of(model) != before,
    }


def evaluate_nothing(lesson: Any) -> dict[str, str]:
    return refusal_of(lambda: lesson.evaluate(classifier(7), Watched(0)))


def evaluate_in_bfloat16(lesson: Any, size: int, num_wrong: int) -> list[float]:
    """Loss and accuracy where each target that is wrong costs 64, and all others nothing."""
    found = lesson.evaluate(Saturated(), Signs(size, num_wrong), batch_size=size)
    returned("evaluate", found)
    return [float(found.loss), float(found.accuracy), float(found.num_targets)]
