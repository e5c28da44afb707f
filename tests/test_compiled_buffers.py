"""What a file that Inductor generated does, read from its text: launches, who holds which memory, and its stacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from profkit.capture.compiled.generated_file import GeneratedFile, describe_memory, read_generated_file
from profkit.run.compiled_code import Allocation, CompiledGraph, Holder, Launch
from tests.empty_kernels import empty_kernels

pytest.importorskip("torch")

from torch import Tensor
from torch._inductor import config

from profkit.analysis.memory.stacks import StackFacts

TRITON = """\
import torch
triton_poi_fused_gelu_0 = async_compile.triton('triton_poi_fused_gelu_0', 'source')

def partition_0(args):
    arg0_1, arg1_1, buf9 = args
    args.clear()
    with torch.cuda._DeviceGuard(0):
        torch.cuda.set_device(0)
        buf0 = empty_strided_cuda((8, 4), (4, 1), torch.float32)
        extern_kernels.mm(arg0_1, reinterpret_tensor(arg1_1, (4, 4), (1, 4), 0), out=buf0)
        del arg0_1
        buf1 = buf0; del buf0  # reuse
        stream0 = get_raw_stream(0)
        triton_poi_fused_gelu_0.run(buf1, buf9, 32, stream=stream0)
        del buf9
        buf2 = torch.ops.aten._scaled_dot_product_flash_attention.default(buf1, buf1, buf1)
        buf3 = buf2[0]
        assert_size_stride(buf3, (8, 4), (4, 1), 'attention')
        buf4 = buf2[1]
        del buf2
        buf5 = extern_kernels.convolution(buf3, arg1_1, stride=(1,))
        del buf3
    return (buf1, buf4, buf5, )

class Runner:
    def __init__(self, partitions):
        self.partitions = partitions

    def call(self, args):
        arg0_1, arg1_1, saved = args
        args.clear()
        buf9 = empty_strided_cuda((8, 4), (4, 1), torch.float32).as_strided((8, 4), (4, 1))
        partition0_args = [arg0_1, arg1_1, buf9]
        del arg0_1, buf9
        (buf1, buf4, buf5) = self.partitions[0](partition0_args)
        del partition0_args
        buf6 = empty_strided_cuda((16, 4), (4, 1), torch.float32)
        buf7 = reinterpret_tensor(buf6, (8, 4), (4, 1), 0)  # alias
        triton_poi_fused_gelu_0.run(buf1, buf7, 32, stream=stream0)
        del buf7
        buf8 = reinterpret_tensor(buf1, (32, ), (1, ), 0); del buf1  # reuse
        triton_poi_fused_gelu_0.run(buf6, buf8, 32, stream=stream0)
        del buf6
        buf10 = saved; del saved  # reuse
        triton_poi_fused_gelu_0.run(buf10, arg1_1, 32, stream=stream0)
        return (reinterpret_tensor(buf8, (8, 4), (4, 1), 0), 4, arg1_1, buf10, )

def benchmark_compiled_module(times=10, repeat=10):
    arg0_1 = rand_strided((8, 4), (4, 1), device='cuda:0', dtype=torch.float32)
    return print_performance(lambda: call([arg0_1]), times=times, repeat=repeat)
"""


def line_of(text: str) -> int:
    """Return the number of the one line that has a text."""
    (found,) = (number for number, line in enumerate(TRITON.splitlines(), 1) if text in line)
    return found


def graph_of(*launches: Launch) -> CompiledGraph:
    return CompiledGraph("3f9a1c22e0", "cxyz", "2.11.0", "Model.forward model.py:20", False, launches)


def test_memory_is_followed_from_its_allocation_through_reuse_to_its_end() -> None:
    code = read_generated_file(TRITON)
    held = {one.holders[0][1]: one for one in code.memory}
    assert [name for _, name in held["buf0"].holders] == ["buf0", "buf1", "buf8"]
    assert held["buf0"].line == line_of("buf0 = empty")
    assert held["buf0"].holders[2][0] == line_of("buf8 = reinterpret")
    assert held["buf0"].freed is None, "it is returned"
    assert held["buf9"].freed == line_of("        del buf9")
    assert held["buf6"].freed == line_of("        del buf6"), (
        "a view is another name for memory and takes it from nobody"
    )
    assert [name for _, name in held["buf6"].holders] == ["buf6"]


def test_what_a_call_returns_was_allocated_on_its_line() -> None:
    code = read_generated_file(TRITON)
    held = {one.holders[0][1]: one for one in code.memory}
    assert "buf2" not in held, "the name of several results holds no memory of its own"
    assert held["buf3"].line == held["buf4"].line == line_of("buf2 = torch")
    assert held["buf3"].freed == line_of("        del buf3")
    assert held["buf5"].line == line_of("buf5 =")


def test_memory_that_the_code_is_given_may_be_reused() -> None:
    code = read_generated_file(TRITON)
    (held,) = (one for one in code.memory if one.line is None)
    assert held.holders == [(line_of("buf10 = saved"), "buf10")]
    assert code.inputs == ("arg0_1", "arg1_1", "saved")
    assert code.outputs == ("buf8", "", "arg1_1", "buf10")


def test_launches_stand_in_the_order_in_which_they_run() -> None:
    code = read_generated_file(TRITON)
    kernels = [one.function for one in code.calls]
    assert kernels == [
        "extern_kernels.mm",
        "triton_poi_fused_gelu_0.run",
        "torch.ops.aten._scaled_dot_product_flash_attention.default",
        "extern_kernels.convolution",
        *["triton_poi_fused_gelu_0.run"] * 3,
    ]
    calls, partition, rest = code.spans
    assert calls[1] == line_of("(buf1, buf4, buf5) =")
    assert partition[0] < line_of("buf0 = empty") < partition[1] < calls[0]
    assert rest[0] == calls[1] + 1


def test_a_holder_is_whose_result_it_is_or_else_its_launchs_only_module() -> None:
    code = read_generated_file(TRITON)
    product, gelu, last = line_of("extern_kernels.mm"), line_of("run(buf1, buf9"), line_of("run(buf6, buf8")
    launches = (
        Launch(product, "extern_kernels.mm", True, ("fc",), ("model.py:3 forward",)),
        Launch(gelu, "triton_poi_fused_gelu_0", False, ("gelu", "out"), ("model.py:4 forward",)),
        Launch(last, "triton_poi_fused_gelu_0", False, ("gelu", "out")),
    )
    graph = describe_memory(graph_of(*launches), code, {"buf1": ("gelu", "model.py:5 forward")})
    assert graph.spans == code.spans
    allocation = next(one for one in graph.allocations if one.line == line_of("buf0 = empty"))
    assert allocation == Allocation(
        line_of("buf0 = empty"),
        (
            Holder(line_of("buf0 = empty"), product, "fc", "model.py:3 forward", "buf0"),
            Holder(line_of("buf1 = buf0"), gelu, "gelu", "model.py:5 forward", "buf1"),
            Holder(line_of("buf8 ="), last, None, None, "buf8"),
        ),
    )
    (given,) = (one for one in graph.allocations if one.line is None)
    assert [(one.line, one.name) for one in given.holders] == [(0, "saved"), (line_of("buf10 = saved"), "buf10")]
    assert (graph.inputs[2], graph.outputs) == ("saved", ("buf8", "", "arg1_1", "buf10"))


def test_a_file_without_a_call_is_none_of_inductors_wrappers() -> None:
    assert read_generated_file("def triton_(in_ptr0):\n    pass\n") == GeneratedFile()


class _Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.up = nn.Linear(size, 4 * size)
        self.down = nn.Linear(4 * size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


def test_every_buffer_of_code_that_torch_generates_has_a_launch_that_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    model = torch.compile(nn.Sequential(_Block(16), _Block(16)))
    with empty_kernels():
        model(torch.randn(8, 16)).sum().backward()
    codes = [code for path in tmp_path.rglob("c*.py") if (code := read_generated_file(path.read_text())).calls]
    assert len(codes) == 2
    for code in codes:
        described = describe_memory(graph_of(), code, {}).allocations
        assert described
        launches = {launch.line for launch in code.calls}
        assert all(holder.launch in launches for one in described for holder in one.holders)
    assert any(len(one.holders) > 1 for code in codes for one in code.memory), "Inductor reuses memory"


STACKS: list[StackFacts] = []


def noted(x: Tensor) -> Tensor:
    """Note the stack as the allocator's history does, without the frames within this operation."""
    taken = torch._C._profiler.gather_traceback(True, False, False)
    (frames,) = torch._C._profiler.symbolize_tracebacks([taken])
    stack = tuple((frame["name"], frame["filename"], frame["line"]) for frame in frames)
    generated = [index for index, (_, file, _) in enumerate(stack) if "torchinductor" in file]
    STACKS.append(StackFacts(stack[generated[0] :] if generated else stack))
    return x.clone()


class Block(nn.Module):
    def __init__(self, operation: Any) -> None:
        super().__init__()
        self.operation = operation

    def forward(self, x: Tensor) -> Tensor:
        return x + self.operation(torch.relu(x))


@pytest.mark.slow
def test_compiled_code_bears_the_line_that_inductor_recorded_forward_and_backward() -> None:
    operation = torch.library.custom_op("profkit_test::noted", noted, mutates_args=())
    operation.register_fake(torch.empty_like)
    operation.register_autograd(lambda _context, gradient: operation(gradient))
    with config.patch(force_disable_caches=True), empty_kernels():
        torch.compile(Block(operation))(torch.ones(4, requires_grad=True)).sum().backward()
    line = Block.forward.__code__.co_firstlineno + 1
    forward, backward = STACKS
    for stack in (forward, backward):
        assert stack.is_compiled
        assert stack.label.startswith(f"{Path(__file__).name}:{line} forward (compiled code)")
