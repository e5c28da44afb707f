"""Values that are odd in their place, and ways to put them anywhere in nested data."""

from __future__ import annotations

import copy
from random import Random
from typing import Any

NUMBERS: list[Any] = [0, 1, -1, 2, 7, 127, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**60, 2**61, 2**62, 2**63 - 1, 2**63]
NUMBERS += [-(2**31), -(2**62), -(2**63), 2**64, 10**30, 0.5, -1.5, 1e18, 1e300, float("inf"), float("nan")]
TEXTS = ["", " ", "x", "0", "-1", "1e5", "12,13", "nan", "step 0", "forward", "a/b", "a\\/b", "*", "[", "layer *", "\0"]
TEXTS += [
    "\x1b[31mred\x1b[0m",
    "two\nlines",
    "tab\there",
    "\u202eright to left",
    "\u2028",
    "=1+1",
    "|",
    "$x$",
    "注意力",
]
TEXTS += ["a" * 5000, "_x" * 3000, "(" * 3000, "<" * 3000, "::" * 2000, "1" * 4400, "x\r", "\x7f", "\x9b31m", "\ufffe"]
TEXTS += ["triton_red_fused" + "_exp_max_sub" * 300, "triton_poi_fused" + "_t_copy" * 300 + "!", "-packages/" * 400]
PLAIN: list[Any] = [None, True, False, *NUMBERS, *TEXTS]


def odd(random: Random) -> Any:
    """Return a value that JSON and pickle both hold: mostly a plain one."""
    if random.random() < 0.85:
        return random.choice(PLAIN)
    choices: list[Any] = [[], {}, [1, 2], {"a": 1}, [[]], [{}], [None] * 3, {"x": {"y": []}}, [0] * 2000]
    return copy.deepcopy(random.choice(choices))


def near(random: Random, value: Any) -> Any:
    """Return something like a value: of its type, a little or much beside it; or an odd one."""
    if isinstance(value, bool) or random.random() < 0.4:
        return odd(random)
    if isinstance(value, int):
        return value + random.choice([1, -1, 512, -512, 2**20, -(2**20), value, -2 * value, 2**40])
    if isinstance(value, str):
        return random.choice([value + "\x1b[0m", value[: len(value) // 2], value * 2, value.upper(), value + " 1"])
    return odd(random)


def mutate(random: Random, data: Any) -> Any:
    """Return nested data with one thing changed somewhere in it; the data itself is changed too."""
    places = list(_places(random, data))
    if not places:
        return odd(random)
    holder, key = random.choice(places)
    _change(random, holder, key)
    return data


def _places(random: Random, data: Any, depth: int = 0) -> list[tuple[Any, Any]]:
    """Return places on one random way down, so that rare keys high up are changed as often as common ones below."""
    if isinstance(data, dict) and data:
        key = random.choice(list(data))
    elif isinstance(data, list) and data:
        key = random.randrange(len(data))
    else:
        return []
    deeper = _places(random, data[key], depth + 1)
    return [(data, key), *deeper]


def _change(random: Random, holder: Any, key: Any) -> None:
    action = random.choice(["odd", "near", "near", "delete", "double", "move", "swap"])
    if action == "near":
        holder[key] = near(random, holder[key])
    elif action == "delete":
        del holder[key]
    elif action == "double" and isinstance(holder, list):
        holder.insert(random.randrange(len(holder) + 1), copy.deepcopy(holder[key]))
    elif action == "move" and isinstance(holder, list):
        holder.insert(random.randrange(len(holder)), holder.pop(key))
    elif action == "swap":
        other = random.choice(list(holder)) if isinstance(holder, dict) else random.randrange(len(holder))
        holder[key], holder[other] = holder[other], holder[key]
    else:
        holder[key] = odd(random)


def damage(random: Random, content: bytes) -> bytes:
    found = bytearray(content)
    action = random.choice(["flip", "flip", "flip", "cut", "repeat", "insert"])
    for _ in range(random.choice([1, 1, 2, 8, 64])):
        at = random.randrange(len(found)) if found else 0
        if action == "flip" and found:
            found[at] = random.choice([0, 0xFF, found[at] ^ 1 << random.randrange(8), random.randrange(256)])
        elif action == "insert":
            found[at:at] = random.randbytes(random.choice([1, 4, 100]))
        elif action == "repeat":
            found[at:at] = found[at : at + 200]
        elif action == "cut":
            del found[at:]
    return bytes(found)
