"""Targets, run directories, nsys discovery and command lines: all without starting a target."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from profkit.errors import RunError, ToolError, UsageError
from profkit.launch import manifest
from profkit.launch import nsys as nsys_module
from profkit.launch.manifest import SECRET_NAMES, redact
from profkit.launch.nsys import (
    export_report,
    find_importer,
    find_nsys,
    import_raw,
)
from profkit.launch.passes import build_rank_argv, model_passes, parse_target, target_kind
from profkit.models import PRESETS, CompileMode, TrainingOptions
from profkit.run.directory import make_run_directory
from profkit.run.recording import MemoryOptions
from tests.golden import check_text

OLD = "2023.4.4.54-234433681190v0"
VERSION_LINE = "NVIDIA Nsight Systems version {} "


def _program(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def _nsys(path: Path, version: str = "2023.4.4.54-1v0") -> Path:
    return _program(path, f"echo '{VERSION_LINE.format(version)}'")


class TestRunDirectory:
    def test_default_lies_under_runs_with_time_and_target(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        made = [make_run_directory(None, "model.tiny") for _ in range(3)]
        assert len(set(made)) == 3
        for path in made:
            assert path.is_dir()
            assert path.parent == Path("runs")
            assert "Z-model.tiny" in path.name

    def test_a_directory_without_permission_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("profkit.run.directory.os.access", lambda path, mode: False)  # root may do anything
        with pytest.raises(RunError, match="no permission to write; name another directory with -o"):
            make_run_directory(tmp_path, "model.tiny")


class TestFindNsys:
    def test_none_anywhere(self, tmp_path: Path) -> None:
        assert find_nsys({"PATH": str(tmp_path)}, tmp_path) is None

    def test_named_one_comes_before_path_and_path_before_the_usual_places(self, tmp_path: Path) -> None:
        named = _nsys(tmp_path / "named" / "nsys", OLD)
        on_path = _nsys(tmp_path / "bin" / "nsys", "2.0")
        usual = _nsys(tmp_path / "opt/nvidia/nsight-systems/2024.1.1/bin/nsys", "3.0")
        path = {"PATH": str(on_path.parent)}
        found = [
            find_nsys(environment, tmp_path)
            for environment in ({**path, "NSYS": str(named)}, path, {"PATH": str(tmp_path)})
        ]
        assert [(nsys.path, nsys.version) for nsys in found if nsys] == [
            (named, OLD),
            (on_path, "2.0"),
            (usual, "3.0"),
        ]

    @pytest.mark.parametrize(
        "places",
        [
            [f"opt/nvidia/nsight-systems/{version}/bin/nsys" for version in ("2024.10.1", "2024.9.1", "2023.4.4")],
            ["opt/nvidia/nsight-systems-cli/2025.3.1/target-linux-x64/nsys"],
            ["opt/nvidia/nsight-compute/2025.3.1/host/target-linux-x64/nsys"],
            ["usr/local/cuda-12.4/bin/nsys"],
            ["usr/lib/nsight-systems/target-linux-x64/nsys"],
            ["usr/lib/x86_64-linux-gnu/nsight-systems/target-linux-x64/nsys"],
        ],
    )
    def test_the_newest_in_the_usual_places(self, tmp_path: Path, places: list[str]) -> None:
        newest, *_ = [_nsys(tmp_path / place) for place in places]
        found = find_nsys({"PATH": str(tmp_path)}, tmp_path)
        assert found is not None
        assert found.path == newest

    def test_one_that_cannot_be_run_or_does_not_start(self, tmp_path: Path) -> None:
        with pytest.raises(ToolError, match=r"\$NSYS is .*/no/nsys, which cannot be run"):
            find_nsys({"PATH": "", "NSYS": str(tmp_path / "no" / "nsys")}, tmp_path)
        broken = _program(tmp_path / "nsys", "echo 'libnope.so: cannot open' >&2; exit 127")
        with pytest.raises(ToolError, match=r"nsys does not start: libnope\.so: cannot open"):
            find_nsys({"PATH": str(broken.parent)}, tmp_path)


def _import(folder: Path) -> tuple[Path, Path]:
    """Import a raw file by the importer next to an nsys in this folder; return it and the report."""
    raw, report = folder / "trace.qdstrm", folder / "trace.nsys-rep"
    raw.touch()
    with (folder / "log").open("w+b") as log:
        import_raw(raw, report, folder / "target-linux-x64" / "nsys", log)
    return raw, report


class TestImporter:
    def test_the_importer_next_to_nsys_comes_first(self, tmp_path: Path) -> None:
        nsys = tmp_path / "opt/nvidia/nsight-compute/2025.3.1/host/target-linux-x64/nsys"
        elsewhere = _program(tmp_path / "opt/nvidia/nsight-systems/2024.1/host-linux-x64/QdstrmImporter", "")
        assert find_importer(nsys, tmp_path) == elsewhere
        beside = _program(nsys.parent.parent / "linux-desktop-glibc_2_11_3-x64/QdstrmImporter", "")
        assert find_importer(nsys, tmp_path) == beside

    def test_missing_libraries_are_named_with_their_packages(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        listing = "\tlibdw.so.1 => not found\n\tlibelf.so.1 => not found\n\tlibdw.so.1 => not found\n"
        _program(tmp_path / "host-linux-x64" / "QdstrmImporter", "exit 127")
        monkeypatch.setattr("profkit.launch.nsys.subprocess.run", lambda *_, **__: SimpleNamespace(stdout=listing))
        with pytest.raises(ToolError, match=r"lacks libdw\.so\.1, libelf\.so\.1: install libdw1 libelf1 and run again"):
            _import(tmp_path)
        assert (tmp_path / "trace.qdstrm").exists()

    @pytest.mark.parametrize("failures", [0, 2])
    def test_a_raw_file_is_imported_and_removed_also_where_the_importer_fails_at_first(
        self, tmp_path: Path, failures: int
    ) -> None:
        script = (
            'echo >> "$0.tries"; for a in "$@"; do case $a in --output-file=*) echo report >> "${a#*=}";; esac; done'
        )
        ends = f"[ $(wc -l < $0.tries) -gt {failures} ] || exit 2"
        _program(tmp_path / "host-linux-x64" / "QdstrmImporter", f"{script}\n{ends}")
        raw, report = _import(tmp_path)
        assert (raw.exists(), report.read_text()) == (False, "report\n"), "nothing of the failed ones is left"

    def test_a_failed_import_keeps_the_raw_file(self, tmp_path: Path) -> None:
        _program(tmp_path / "host-linux-x64" / "QdstrmImporter", "exit 3")
        with pytest.raises(ToolError, match=r"exit status 3.*is in .*log"):
            _import(tmp_path)
        assert (tmp_path / "trace.qdstrm").exists()

    def test_no_importer(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(nsys_module, "find_importer", lambda nsys: None)
        with pytest.raises(ToolError, match="no QdstrmImporter"):
            _import(tmp_path)


class TestExport:
    EXPORTS = """
case $1 in --version) echo 'NVIDIA Nsight Systems version 1.0';; export)
for a in "$@"; do case $a in --output=*) echo exported > "${a#*=}"; echo x >> "$0.count";; esac; done;; esac"""

    @pytest.fixture
    def report(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.delenv("NSYS", raising=False)
        report = tmp_path / "report" / "a.nsys-rep"
        report.parent.mkdir()
        report.write_bytes(b"report")
        return report

    def test_goes_into_the_cache_once(self, report: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        nsys = _program(tmp_path / "nsys", self.EXPORTS)
        monkeypatch.setenv("NSYS", str(nsys))
        exported = export_report(report)
        assert exported.read_text() == "exported\n"
        assert export_report(report) == exported
        assert Path(f"{nsys}.count").read_text() == "x\n"
        assert tmp_path / "cache" in exported.parents
        assert [path.name for path in report.parent.iterdir()] == ["a.nsys-rep"]
        report.write_bytes(b"another")
        assert export_report(report) != exported

    def test_failure_quotes_the_last_line_and_leaves_nothing(
        self, report: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        script = (
            f"case $1 in --version) echo '{VERSION_LINE.format('1.0')}';; *) echo first; echo bad file; exit 1;; esac"
        )
        monkeypatch.setenv("NSYS", str(_program(tmp_path / "nsys", script)))
        with pytest.raises(ToolError, match=r"could not export .*a.nsys-rep: bad file$"):
            export_report(report)
        assert list((tmp_path / "cache" / "profkit" / "exports").iterdir()) == []

    def test_without_nsys_says_how_elsewhere(self, report: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(nsys_module, "find_nsys", lambda environment: None)
        with pytest.raises(ToolError, match=r"run `nsys export --type=sqlite .*a.nsys-rep` where it is"):
            export_report(report)


class TestManifest:
    def testgit_revision_is_the_working_directorys(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        assert manifest.git_revision() is None


WORDS = {
    "as ranks": (
        "python train.py --lr 1",
        "/usr/bin/python3.12 -m pkg.train -m",
        "python -O -X dev a.py",
        *("torchrun train.py", "/opt/bin/accelerate launch train.py", "python -m torch.distributed.run train.py"),
        *("bash train.sh", "python -c pass", "python"),
    ),
    "without secrets": (
        "train.py --hf-token s3cr3t --lr 1",
        "--api-key=s3cr3t",
        "env WANDB_API_KEY=s3cr3t python",
        "wandb.api_key=s3cr3t",
        "--password --lr 1",
        "--max-tokens 5 monkey x",
        "--webhook https://x",
    ),
    "kind": ("model.tiny", "tiny", "no-such-program", "sh", "python train.py"),
    "preset": (
        *(f"model.{name}" for name in PRESETS),
        "model.smal",
        "model.2.7b",
        "model.gpt5",
        "xl",
        "no-such-command",
        "",
    ),
}


def test_what_becomes_of_words() -> None:
    """Torch's launcher starts scripts and modules; the values of secrets are left out; what is a target, and which."""
    calls: dict[str, Callable[[list[str]], object]] = {
        "as ranks": lambda words: build_rank_argv(words, 2),
        "without secrets": lambda words: list(redact(words, [*SECRET_NAMES, "web*"])),
        "kind": target_kind,
        "preset": lambda words: parse_target("".join(words)),
    }
    text = ""
    for what, commands in WORDS.items():
        for command in commands:
            try:
                found = calls[what](command.split())
            except UsageError as error:
                found = f"REFUSED {error}"
            text += f"{what}: {command} → {' '.join(found) if isinstance(found, list) else found}\n"
    check_text("words-of-commands", text)


@pytest.mark.parametrize(
    ("mode", "recorders"),
    [("none", ["memory", "none", "kineto"]), ("default", ["memory", "kineto", "none"])],
)
def test_compiled_code_is_recorded_before_a_plain_pass_fills_the_cache(mode: CompileMode, recorders: list[str]) -> None:
    options = TrainingOptions("tiny", compile_mode=mode)
    assert [one.order.recorder for one in model_passes(options, "kineto", MemoryOptions())] == recorders
