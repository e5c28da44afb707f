"""Rows of causes: kernels that do the same work in more time, or write to memory what need not be there."""

from __future__ import annotations

import re
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from itertools import takewhile

from profkit.analysis.causes.changes import (
    NOTHING,
    By,
    Choose,
    compute_in_bf16,
    remove_operations,
    scale_operations,
)
from profkit.analysis.causes.evidence import (
    Cause,
    Evidence,
    Operation,
    Place,
    edits,
    is_part,
    name_times,
    source_line,
    sums_by_index,
)
from profkit.analysis.kernels import product_dtype
from profkit.analysis.step_replay.kernel_edits import is_convolution, is_norm_by_channel, is_recurrent
from profkit.analysis.step_replay.steps import ReplayedStep
from profkit.analysis.summary import PRODUCTS, SMALL
from profkit.names import BACKWARD, FORWARD, OPTIMIZER, kind_of
from profkit.run.work import INSTANCE_NORM, SIGNAL_CONVOLUTION, VOLUME_CONVOLUTION

_ALIGNED: By = {"least": 0.15, "expected": 0.45, "most": 0.8}
"""What products of other sizes take of the time of misaligned ones, where their FLOPs are unknown."""
_OF_PEAK: By = {"least": 0.9, "expected": 0.6, "most": 0.35}
"""Which share of the peak rate they reach, where no aligned product of their type shows it."""
_OF_NEIGHBOURS = 0.65
"""At least this share of the rate of the step's best aligned products."""
_LONG_SCAN_NS = 100_000
_ALONG_LAST_AXIS: By = {"least": 0.01, "expected": 0.04, "most": 0.2}
"""What long sums over an outer axis take along the last one, with copies to and fro, as a share."""
_LAYOUTS_LEFT: By = {"least": 0.0, "expected": 0.0, "most": 0.4}
_LEFT: By = {"least": 0.0, "expected": 0.0, "most": 0.1}
_OF_BANDWIDTH: By = {"least": 0.95, "expected": 0.8, "most": 0.6}
_MISALIGNED = re.compile(r"_align[12](?!\d)")
_CONVERTED = 0.25
"""A model whose images have the wrong layout converts it for most convolutions, another for few."""
_STARVED = 2.5
"""A norm's statistics take 0.7 to 1.2 times what writing its output does where the GPU has enough to do, else 4.4."""
_CONVERTS = re.compile(r"nchwToNhwc|nhwcToNchw", re.IGNORECASE)
_CHANGES_LAYOUT = re.compile(r"(?<![a-z]_)elementwise_kernel<.*nocast<at::native::direct_copy_kernel")
"""ATen's copy of a tensor whose elements lie in another order, in its own type."""
_IN_FP64 = re.compile(r"lambda\(double\)|(?:Functor|func_wrapper_t)<double|<double, double|dgemm_|d884gemm|f64f64")
_FP32_ATTENTION = re.compile(r"fmha_cutlass[FB]_f32_")
_CELL = re.compile(r"(?:lstm|gru)_cell")
"""torch's kernel of a cell's elementwise operations."""
_NEARLY_ALL = 0.9
_IN_FP32: By = {"least": 0.1, "expected": 0.5, "most": 0.8}
"""What kernels in fp64 take in fp32: half the bytes move, and arithmetic is from 2 to 64 times as fast."""
_FUSED_IN_HALF: By = {"least": 0.5, "expected": 0.9, "most": 1.5}
_FUSED_IN_FP32: By = {"least": 1.2, "expected": 1.8, "most": 2.5}
"""What fused attention takes of the time of its two products: in fp32 there is no flash kernel."""
_AROUND_SCORES: By = {"least": 0.2, "expected": 0.55, "most": 0.95}
"""What is left of a module's other small kernels: 0.7, 0.6 and 0.2 of three `nn.MultiheadAttention`s on an H200."""
_CAUSAL: By = {"least": 0.25, "expected": 0.4, "most": 0.65}
"""What fused attention takes that skips hidden keys, of its time with a mask; cuDNN's on an H200 0.38 and 0.41."""
_ADDED_AT_ONCE: By = {"least": 0.1, "expected": 0.4, "most": 0.8}
"""What adding rows by index takes without an order, of what it takes in order; 0.40 for bonds' rows on an H200."""
_OF_MOVING: By = {"least": 1.0, "expected": 6.0, "most": 60.0}
"""How many times as long as to read and write the rows: an order costs far more where few indices come very often."""
_UNMASKED: By = {"least": 0.5, "expected": 0.8, "most": 0.95}
_HARDLY_ANY = 0.05
_COUNTED = 0.8
"""Where the loss counts more of the positions, to select them buys little."""
_SELECTED = 0.02
"""What selecting rows takes, and adding them up in backward, of what scoring all of them does."""


def _fp32_products(evidence: Evidence) -> Iterator[Cause]:
    """Products in fp32, which use no tensor cores."""
    products = [one for one in evidence.kernels if _is_in_simple_fp32(one)]
    if not products:
        return
    time_ns = sum(one.duration_ns for one in products)
    module = _busiest(products)
    inside = sum(one.module == module for one in products)
    where = f", {inside:,} of them in one module" if module is not None and inside < len(products) else ""
    yield Cause(
        code="tf32",
        cause=f"{len(products):,} matrix products run in fp32",
        detail=f", without tensor cores{where}",
        module=module,
        change='torch.set_float32_matmul_precision("high")',
        changes=edits("tf32"),
        edit="tf32",
        costs="precision: products keep 10 bits of mantissa",
        evidence={"product_ns": time_ns, "products": len(products)},
    )


def _is_in_simple_fp32(operation: Operation) -> bool:
    return product_dtype(operation.name) == "fp32" and not is_convolution(operation.name)


def _tf32_products(evidence: Evidence) -> Iterator[Cause]:
    """Products in TF32, hardly any in fp32, of a program without autocast: tensor cores multiply bf16 faster."""
    products = [one for one in evidence.kernels if product_dtype(one.name) == "tf32"]
    time_ns = sum(one.duration_ns for one in products)
    in_fp32_ns = sum(one.duration_ns for one in evidence.kernels if _is_in_simple_fp32(one))
    if not products or in_fp32_ns > _HARDLY_ANY * time_ns or evidence.condition("autocast_dtypes"):
        return
    yield Cause(
        code="autocast",
        cause=f"{len(products):,} matrix products run in TF32",
        module=_busiest(products),
        change="TrainingArguments(bf16=True)" if evidence.is_in_trainer else 'torch.autocast("cuda", torch.bfloat16)',
        changes=edits("autocast:bf16"),
        edit="autocast:bf16",
        costs="precision: products and activations keep 7 bits of mantissa",
        evidence={"product_ns": time_ns, "products": len(products)},
    )


def _left_out_of_autocast(evidence: Evidence) -> Iterator[Cause]:
    """Modules whose products or attention run in fp32 or TF32, where most of the others' run in 16 bits.

    Autocast keeps no product in fp32 itself. Attention that torch writes out computes in fp32 inside, and how recurrent
    layers train in 16 bits is a question of its own.
    """
    dtypes = evidence.condition("autocast_dtypes")
    products = [one for one in evidence.kernels if one.category in PRODUCTS and one.phase != OPTIMIZER]
    modules = _find_modules_in_fp32(evidence, products)
    chosen, others = [one for one in products if one.module in modules], Counter[bool]()
    for one in products:
        others[_is_in_fp32(one)] += one.duration_ns * (one.module not in modules)
    time_ns = sum(one.duration_ns for one in chosen)
    is_rare = others[False] < max(others[True], _HARDLY_ANY * time_ns)
    if not modules or is_rare or (dtypes is not None and not dtypes):
        return
    outer = [module for module in modules if not any(is_part(module, other) for other in modules)]
    cost = Counter[str]()
    for one in chosen:
        (module,) = (module for module in outer if one.module == module or is_part(one.module, module))
        cost[module] += one.duration_ns
    first, *further = sorted(outer, key=lambda module: -cost[module])
    attention = sum(one.category == "attention" for one in chosen)

    def choose(step: ReplayedStep) -> set[int]:
        return {one.call for one in evidence.operations(step) if one.module in modules and one.phase != OPTIMIZER}

    yield Cause(
        code="autocast",
        cause=f"{'attention runs' if attention else 'matrix products run'} in fp32, and most others in 16 bits",
        detail=f": {len(chosen) - attention} products" + f" and {attention} kernels of attention" * bool(attention),
        module=first,
        further_modules=further,
        change="leave it to autocast: no torch.autocast(…, enabled=False) and no .float() around it",
        changes=[compute_in_bf16(choose)],
        costs="precision: products and activations keep 7 bits of mantissa",
        evidence={"product_ns": time_ns, "products": len(chosen)},
    )


def _find_modules_in_fp32(evidence: Evidence, products: Sequence[Operation]) -> set[str]:
    """Return the modules nearly all of whose own products run in fp32, if they are no small part of all of those."""
    skipped = attention_modules(evidence) | {
        one.module for one in evidence.kernels if is_recurrent(one.name) or _CELL.search(one.name)
    }
    times, in_fp32 = Counter[str](), Counter[str]()
    for one in products:
        if one.module is not None and one.module not in skipped:
            times[one.module] += one.duration_ns
            in_fp32[one.module] += one.duration_ns * _is_in_fp32(one)
    least_ns = _HARDLY_ANY * in_fp32.total()
    return {module for module in times if in_fp32[module] > max(_NEARLY_ALL * times[module], least_ns)}


def _is_in_fp32(operation: Operation) -> bool:
    return product_dtype(operation.name) is not None or _FP32_ATTENTION.search(operation.name) is not None


def _double_precision(evidence: Evidence) -> Iterator[Cause]:
    """Kernels that compute in fp64, as NumPy's numbers do that nobody converted."""
    computing = [one for one in evidence.kernels if _is_in_fp64(one)]
    if not computing:
        return
    yield Cause(
        code="float64",
        cause=f"{len(computing):,} kernels compute in fp64",
        module=_busiest(computing),
        change=".float() where fp64 comes in",
        changes=[scale_operations(evidence.choose(_is_in_fp64), _IN_FP32, "how much faster fp32 is")],
        costs="digits: 7 rather than 16",
        evidence={"kernels": len(computing), "time_ns": sum(one.duration_ns for one in computing)},
    )


def _is_in_fp64(operation: Operation) -> bool:
    return _IN_FP64.search(operation.name) is not None


def _permutations(evidence: Evidence) -> Iterator[Cause]:
    """``torch.randperm`` on a GPU sorts a random number for each index, however few indices are used."""
    sorting = _find_permutations(evidence.kernels)
    if not sorting:
        return
    lines = [line for line in evidence.lines if line.file and line.thread == "main" and line.method == "randperm"]
    line = max(lines, key=lambda line: line.time_ns, default=None)
    yield Cause(
        code="sort",
        cause="torch.randperm sorts random numbers",
        detail=f": {len(sorting):,} kernels and fills a step",
        line=None if line is None else source_line(line),
        module=sorting[0].module,
        change="torch.randint, or one permutation for many steps",
        changes=[
            remove_operations(
                lambda step: [one.at for one in _find_permutations(evidence.operations(step))],
                _LEFT,
                "what other random indices take",
            )
        ],
        costs="with torch.randint an index may come twice",
        evidence={"kernels": len(sorting), "time_ns": sum(one.duration_ns for one in sorting)},
    )


def _find_permutations(operations: Sequence[Operation]) -> list[Operation]:
    """Return the kernels that mend equal keys, which ``torch.randperm`` alone has, and the sort before each."""
    found: list[Operation] = []
    for at, one in enumerate(operations):
        if "randperm_handle_duplicate_keys" in one.name:
            before = reversed(operations[:at])
            found += [one, *takewhile(lambda one: "radix_sort" in one.name or one.category == "fill", before)]
    return found


def _sums_by_index(evidence: Evidence) -> Iterator[Cause]:
    """Backward of ``x[index]`` sorts the indices and adds one row after another; of ``index_select`` it just adds."""
    summing = [one for one in evidence.kernels if sums_by_index(one)]
    if not summing or evidence.condition("deterministic_algorithms") is True:
        return
    modules = {one.module for one in summing}

    def sorts(one: Operation) -> bool:
        return one.phase == BACKWARD and one.module in modules and "radix_sort" in one.name

    time_ns = sum(one.duration_ns for one in summing)
    indexing = [line for line in evidence.operator_lines if line.operator == "index"]
    moved = sum(line.bytes for line in indexing if line.path and kind_of(line.path[-1]) in modules)
    left = _ADDED_AT_ONCE
    if moved and evidence.peaks is not None:
        once = 1e9 * moved / evidence.peaks.bytes_per_s / time_ns
        left = {world: min(share, _OF_MOVING[world] * once) for world, share in left.items()}
    # A mask has torch look up, and wait for, which of its elements are true.
    places = {(line.file, line.line) for line in indexing}
    has_masks = any(line.waits >= 1 and line.place in places for line in evidence.lines)
    change = "torch.where or masked_fill in place of x[mask]" if has_masks else "x.index_select(dim, index), or gather"
    yield Cause(
        code="gather",
        cause="backward of x[index] sorts the indices, and adds one row after another",
        detail=f", {name_times(len(summing))}",
        module=_busiest(summing),
        change=change,
        changes=[
            remove_operations(evidence.choose(sorts), NOTHING, "which kernels add"),
            scale_operations(evidence.choose(sums_by_index), left, "how fast rows are added"),
        ],
        evidence={"kernels": len(summing), "time_ns": time_ns},
    )


def _outer_scans(evidence: Evidence) -> Iterator[Cause]:
    """Cumulative sums over an axis that is not the last: a thread for each of the others, which goes through them all.

    That is slow where there are few others, as of places among a few experts.
    """
    scans = [one for one in evidence.kernels if _is_outer_scan(one)]
    if not scans:
        return
    yield Cause(
        code="scan",
        cause="cumulative sums over an outer axis leave the GPU mostly empty",
        detail=f": {len(scans):,} a step",
        module=_busiest(scans),
        change="sum over the last axis: x.t().contiguous().cumsum(-1).t()",
        changes=[scale_operations(evidence.choose(_is_outer_scan), _ALONG_LAST_AXIS, "how fast those are")],
        evidence={"kernels": len(scans), "time_ns": sum(one.duration_ns for one in scans)},
    )


def _is_outer_scan(operation: Operation) -> bool:
    return "scan_outer_dim" in operation.name and operation.duration_ns > _LONG_SCAN_NS


def _misaligned_products(evidence: Evidence) -> Iterator[Cause]:
    """Products of sizes that are no multiple of 8, such as a vocabulary of 50,257: slower kernels take them."""
    products = [one for one in evidence.kernels if _is_misaligned(one)]

    def choose(place: Place) -> Choose:
        return evidence.choose(lambda one: _is_misaligned(one) and (one.phase, one.module) == place)

    if products:
        yield Cause(
            code="sizes",
            cause=f"{len(products)} matrix products have sizes that tensor cores do not fit",
            module=_busiest(products),
            change="pad the size to a multiple of 64",
            changes=[
                scale_operations(choose(place), factor, "how fast padded products are")
                for place, factor in _price_aligned(evidence, products).items()
            ],
            costs="a few more numbers",
            evidence={"product_ns": sum(one.duration_ns for one in products), "kernel": products[0].name},
        )


def _price_aligned(evidence: Evidence, products: Sequence[Operation]) -> dict[Place, By]:
    """Return place → what its misaligned products would take of their time if tensor cores fitted them.

    A place with products of both kinds shows no rate, and its FLOPs are not known apart.
    """
    works, peaks, others = evidence.work_by_place, evidence.peaks, _time_aligned(evidence)
    misaligned: Counter[Place] = Counter()
    for one in products:
        misaligned[one.phase, one.module] += one.duration_ns
    factors = dict.fromkeys(misaligned, _ALIGNED)
    for place, time_ns in misaligned.items():
        work = works.get(place)
        if work is None or peaks is None or work.dtype not in peaks.flops_per_s or work.flops <= 0 or place in others:
            continue
        alike = [other for other in others if other not in misaligned and works[other].dtype == work.dtype]
        known = [1e9 * works[other].flops / others[other] for other in alike]
        factors[place] = {
            world: min(1.0, work.least_ns(rate, _OF_BANDWIDTH[world] * peaks.bytes_per_s) / time_ns)
            for world, rate in _rates_of_aligned(peaks.flops_per_s[work.dtype], known).items()
        }
    return factors


def _time_aligned(evidence: Evidence) -> dict[Place, int]:
    times: Counter[Place] = Counter()
    others: set[Place] = set()
    for one in evidence.kernels:
        if one.category == "attention" or is_convolution(one.name):
            others.add((one.phase, one.module))
        elif one.category == "gemm" and not _is_misaligned(one):
            times[one.phase, one.module] += one.duration_ns
    works = evidence.work_by_place
    known = [place for place in times if place not in others and place in works and works[place].flops > 0]
    return {place: times[place] for place in known}


def _rates_of_aligned(peak: float, known: Sequence[float]) -> By:
    rates = {world: share * peak for world, share in _OF_PEAK.items()}
    if known:
        rates["expected"] = min(max(known), rates["least"])
        rates["most"] = _OF_NEIGHBOURS * rates["expected"]
    return rates


def _is_misaligned(operation: Operation) -> bool:
    _, _, after = operation.name.partition("tensorop")
    return operation.category == "gemm" and _MISALIGNED.search(after) is not None


def _written_attention(evidence: Evidence) -> Iterator[Cause]:
    """Attention without a fused kernel: product, scale, mask, softmax and product inside one module."""
    modules = attention_modules(evidence)
    if not modules:
        return

    def chooses(*categories: str) -> Choose:
        def choose(step: ReplayedStep) -> list[int]:
            found = [one for module in modules for one in _of_scores(evidence.operations(step), module)]
            return [one.at for one in found if one.category in categories]

        return choose

    def choose_others(step: ReplayedStep) -> list[int]:
        of_scores = set(chain(step))
        own = (one for one in evidence.operations(step) if one.module in modules and one.phase != OPTIMIZER)
        return [one.at for one in own if one.category in SMALL and one.at not in of_scores]

    assert evidence.step is not None
    chain, products = chooses(*SMALL), chooses("gemm")
    small = [evidence.operations(evidence.step)[at] for at in chain(evidence.step)]
    multiplied = [evidence.operations(evidence.step)[at] for at in products(evidence.step)]
    is_in_fp32 = any(product_dtype(one.name) is not None for one in multiplied)
    projects = bool(choose_others(evidence.step))
    yield Cause(
        code="attention",
        cause="attention is written out",
        detail=f": {len(small)} kernels write and read the matrix of scores",
        module=_busiest(small),
        change="F.scaled_dot_product_attention" + " (nn.MultiheadAttention: need_weights=False)" * projects,
        changes=[
            remove_operations(chain, NOTHING, "which kernel runs"),
            *([remove_operations(choose_others, _AROUND_SCORES, "which copies go")] * projects),
            scale_operations(
                products,
                _FUSED_IN_FP32 if is_in_fp32 else _FUSED_IN_HALF,
                "how fast fused attention is",
            ),
        ],
        evidence={"small_ns": sum(one.duration_ns for one in small), "kernels": len(small)},
    )


def _is_attention(own: Sequence[Operation]) -> bool:
    """Return whether a module itself multiplies, takes a softmax and multiplies again, in its forward pass."""
    kinds = [one.category for one in own if one.phase != BACKWARD]
    softmaxes = kinds.count("softmax")
    if "attention" in kinds or not softmaxes or kinds.count("gemm") < 2 * softmaxes:
        return False
    at = kinds.index("softmax")
    return "gemm" in kinds[:at] and "gemm" in kinds[at:]


def _of_scores(operations: Sequence[Operation], module: str) -> list[Operation]:
    """Return what a module that is attention does with scores: all but the optimizer's, unless it projects, too.

    Then it is what lies between the product that makes scores and that which reads them; in backward, with both of the
    products on either side.
    """
    own = [one for one in operations if one.module == module and one.phase != OPTIMIZER]
    forward = Counter(one.category for one in own if one.phase != BACKWARD)
    if forward["gemm"] <= 2 * forward["softmax"]:
        return own
    chosen: dict[int, Operation] = {}
    products = [at for at, one in enumerate(own) if one.category == "gemm"]
    for at, one in enumerate(own):
        if one.category == "softmax":
            sides = 2 if one.phase == BACKWARD else 1
            after = bisect(products, at)
            before, behind = products[max(0, after - sides) : after], products[after : after + sides]
            inside = range(before[-1] if before else at, (behind[0] if behind else at) + 1)
            chosen |= {each: own[each] for each in (*before, *inside, *behind)}
    return [chosen[at] for at in sorted(chosen)]


def attention_modules(evidence: Evidence) -> frozenset[str]:
    own: defaultdict[str, list[Operation]] = defaultdict(list)
    for one in evidence.kernels:
        if one.module is not None:
            own[one.module].append(one)
    return frozenset(module for module, operations in own.items() if _is_attention(operations))


def _needless_masks(evidence: Evidence) -> Iterator[Cause]:
    """Fused attention is given a mask that hides what ``is_causal`` hides, or nothing: it reads it and skips no key."""
    masks = () if evidence.work is None else evidence.work.given_masks
    for is_causal, share in ((True, _CAUSAL), (False, _UNMASKED)):
        calls = {mask.module: mask.calls for mask in masks if mask.calls == (mask.causal if is_causal else mask.empty)}

        def chooses(one: Operation, modules: Collection[str] = calls) -> bool:
            return one.category == "attention" and kind_of(one.module or "") in modules

        kernels = [one for one in evidence.kernels if chooses(one)]
        if kernels:
            yield Cause(
                code="attention",
                cause=f"attention reads a mask that {'is causal' if is_causal else 'hides nothing'}",
                detail=f", {name_times(sum(calls.values()))}",
                module=_busiest(kernels),
                change=f"F.scaled_dot_product_attention(…{', is_causal=True' * is_causal}) without attn_mask",
                changes=[scale_operations(evidence.choose(chooses), share, "how fast attention is")],
                evidence={"calls": sum(calls.values()), "time_ns": sum(one.duration_ns for one in kernels)},
            )


def _ignored_positions(evidence: Evidence) -> Iterator[Cause]:
    """The loss ignores most of what a model's last module scores: words of a prompt, or words that are not masked."""
    for scored in () if evidence.work is None else evidence.work.scored_positions:
        left = scored.counted / scored.positions if scored.positions else 1.0

        def choose(step: ReplayedStep, module: str = scored.module) -> list[int]:
            return _scores_and_loss(evidence.operations(step), module)

        chosen = [] if evidence.step is None else choose(evidence.step)
        if left <= _COUNTED and chosen:
            shares: By = {"least": left, "expected": min(1.0, left + _SELECTED), "most": (1 + left) / 2}
            yield Cause(
                code="ignored-positions",
                cause=f"the loss ignores {100 * (1 - left):.0f} % of the positions that are scored",
                detail=", and backward goes through all of them",
                module=scored.module,
                change=f"select the positions that count before {scored.module}: x[labels != -100]",
                changes=[scale_operations(choose, shares, "how fast kernels are on fewer rows")],
                evidence={"positions": scored.positions, "counted": scored.counted},
            )


def _scores_and_loss(operations: Sequence[Operation], module: str) -> list[int]:
    """Return what lies between a module's pass and its backward pass, with both; its weights' casts stay."""
    chosen, between = [], list[int]()
    for one in operations:
        is_own = kind_of(one.module or "") == module
        is_open = bool(between) or (is_own and one.phase == FORWARD)
        if is_own and one.phase == BACKWARD:
            chosen += between
            between = []
            chosen += [one.at] if one.category != "copy/cast" else []
        elif one.phase == OPTIMIZER:
            between = []
        elif is_open and (not is_own or one.category != "copy/cast"):
            between.append(one.at)
    return chosen


def _layout_conversions(evidence: Evidence) -> Iterator[Cause]:
    """Convolutions whose kernels want another order of the axes than the tensors have.

    Between norms that know one order alone, as torch's group and instance norms, each convolution converts anyway.
    """
    kernels = [one for one in evidence.kernels if _CONVERTS.search(one.name)]
    slow_norms = _norms_by_channel(evidence)
    convolutions = sum(is_convolution(one.name) and one not in kernels for one in evidence.kernels)
    called = Counter[str]()
    for line in evidence.operator_lines:
        called[line.operator] += line.count
    old_norms = called["native_group_norm"] + called[INSTANCE_NORM]
    has_old_norms = 2 * old_norms > called["convolution"] + called[VOLUME_CONVOLUTION]
    if kernels and len(kernels) >= _CONVERTED * convolutions and not has_old_norms:
        of_volumes = called[VOLUME_CONVOLUTION] > called["convolution"]
        yield Cause(
            code="channels-last",
            cause=f"{len(kernels)} kernels a step convert the layout of images",
            detail=" for convolutions",
            module=_busiest(kernels),
            change=f"model.to(memory_format=torch.channels_last{'_3d' * of_volumes}), and the images too",
            changes=edits("channels-last"),
            edit=None if of_volumes else "channels-last",
            evidence={"conversion_ns": sum(one.duration_ns for one in kernels), "kernels": len(kernels)},
        )
    elif slow_norms and called["convolution"] > called[VOLUME_CONVOLUTION] + called[SIGNAL_CONVOLUTION]:
        yield Cause(
            code="channels-last",
            cause="batch norms of images read one channel at a time",
            detail=", each by few of the GPU's threads",
            module=_busiest(slow_norms),
            change="model.to(memory_format=torch.channels_last), the images too, and no .contiguous() between",
            changes=edits("channels-last"),
            edit="channels-last",
            evidence={"norm_ns": sum(one.duration_ns for one in slow_norms), "kernels": len(slow_norms)},
        )


def _norms_by_channel(evidence: Evidence) -> list[Operation]:
    """Return the kernels of torch's own batch norms of another order, where they read far slower than they write."""
    norms = [one for one in evidence.kernels if is_norm_by_channel(one.name)]

    def time_ns(kind: str) -> int:
        return sum(one.duration_ns for one in norms if kind in one.name)

    return norms if time_ns("collect_statistics") > _STARVED * time_ns("transform_input") else []


def _undone_layouts(evidence: Evidence) -> Iterator[Cause]:
    """A module's own code undoes the order that the convolutions in it want, and each of them makes it again.

    What a norm copies is torch's own: its group norm knows no other order.
    """
    convolutions = {one.module for one in evidence.kernels if one.module and _is_channels_last(one)}
    norms = {one.module for one in evidence.kernels if one.category == "normalization"}
    copies = [one for one in evidence.kernels if _changes_layout(one)]
    again = {one.module for one in copies} & convolutions
    own = {
        one.module
        for one in copies
        if one.module and one.module not in convolutions | norms and any(is_part(part, one.module) for part in again)
    }
    if own:
        places = own | again
        chosen = [one for one in copies if one.module in places]
        yield Cause(
            code="channels-last",
            cause=f"{len(chosen)} copies a step undo channels-last between convolutions, and make it again",
            module=_busiest([one for one in chosen if one.module in own]),
            change="no .contiguous() or .view() there, or .contiguous(memory_format=torch.channels_last)",
            changes=[
                remove_operations(
                    evidence.choose(lambda one: one.module in places and _changes_layout(one)),
                    _LAYOUTS_LEFT,
                    "which of the copies go",
                )
            ],
            evidence={"copy_ns": sum(one.duration_ns for one in chosen), "kernels": len(chosen)},
        )


def _changes_layout(operation: Operation) -> bool:
    return _CHANGES_LAYOUT.search(operation.name) is not None


def _is_channels_last(operation: Operation) -> bool:
    return is_convolution(operation.name) and "nhwc" in operation.name.lower()


def _busiest(operations: Sequence[Operation]) -> str | None:
    times: defaultdict[str | None, int] = defaultdict(int)
    for one in operations:
        times[one.module] += one.duration_ns
    return max(times, key=lambda module: times[module]) if times else None


KERNELS = (
    _fp32_products,
    _tf32_products,
    _left_out_of_autocast,
    _double_precision,
    _permutations,
    _outer_scans,
    _sums_by_index,
    _misaligned_products,
    _written_attention,
    _needless_masks,
    _ignored_positions,
    _layout_conversions,
    _undone_layouts,
)
