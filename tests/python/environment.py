#!/usr/bin/env python3
"""PyTorch, transformers and PEFT in a virtual environment, to hold our adapters against theirs.

usage: environment.py VENV      (Linux: needs gcc and binutils; downloads 540 MB from PyPI, takes 1.7 GB)

PyPI's torch for Linux links against CUDA's libraries, several gigabytes that a test on the CPU never calls. They are not
installed: for each library that is missing a small one with the symbols that torch wants takes its place, whose functions
do nothing but report failure. `torch.cuda.is_available()` is answered by the real runtime, which is small.
"""

import collections
import pathlib
import re
import subprocess
import sys
import tempfile
import venv

ALONE = ["torch==2.15.0", "peft==0.21.2", "accelerate==1.15.0"]
CUDA = ["nvidia-cuda-runtime==13.2.*"]
WITH_DEPENDENCIES = [
    "filelock", "fsspec", "jinja2", "networkx", "numpy", "psutil", "sympy", "typing-extensions",
    "safetensors==0.8.0", "tokenizers==0.23.3", "transformers==5.24.0",
]
# Which library a symbol comes from, by the beginning of its name.
PREFIXES = {
    "libcublas": "cublas(?!Lt)", "libcublasLt": "cublasLt", "libcudart": "(__)?cuda", "libcudnn": "cudnn",
    "libcufft": "cufft", "libcufile": "cuFile", "libcupti": "cupti", "libcusolver": "cusolver",
    "libcusparse": "cusparse(?!Lt)", "libcusparseLt": "cusparseLt", "libnccl": "p?nccl",
    "libnvrtc": "nvrtc", "libnvshmem_host": "_?nvshmem",
}


def output(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def missing_libraries(site):
    """Names of shared libraries that torch needs and nobody brought, each with its symbols by version."""
    own = sorted((site / "torch" / "lib").glob("*.so*"))
    there = {p.name for p in own} | {p.name for p in site.glob("nvidia/*/lib/*.so*")}
    needed, symbols = set(), set()
    for library in own:
        needed |= set(re.findall(r"\(NEEDED\).*\[(.+)\]", output("readelf", "--dynamic", library)))
        for line in output("nm", "--dynamic", "--undefined-only", library).splitlines():
            name, _, version = line.split()[-1].partition("@")
            symbols.add((name, version.lstrip("@")))
    for name in sorted(needed - there):
        prefix = PREFIXES.get(name.split(".so")[0])
        if prefix:
            versions = collections.defaultdict(list)
            for symbol, version in sorted(symbols):
                if re.match(prefix, symbol):
                    versions[version].append(symbol)
            yield name, versions


def build(name, versions, target):
    with tempfile.TemporaryDirectory() as place:
        place = pathlib.Path(place)
        functions = sorted({s for all_of in versions.values() for s in all_of})
        (place / "stub.c").write_text("".join(f"int {f}(void) {{ return 1; }}\n" for f in functions) + "int stub;\n")
        # The loader insists that a version which is asked of a library is known there.
        map_text = "".join(f"{v} {{ global: {'; '.join(s)}; }};\n" for v, s in versions.items() if v)
        (place / "stub.map").write_text(map_text)
        script = [f"-Wl,--version-script={place / 'stub.map'}"] if map_text else []
        flags = ["-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{name}", *script]
        subprocess.run(["gcc", *flags, place / "stub.c", "-o", target / name], check=True)


def main(folder):
    folder = pathlib.Path(folder).absolute()
    python = folder / "bin" / "python"
    done = folder / "ebbtide-ready"
    if done.is_file():
        return
    venv.create(folder, with_pip=True)

    def install(*what):
        subprocess.run([python, "-m", "pip", "install", "--quiet", *what], check=True)

    install("--upgrade", "pip", "setuptools")
    install("--no-deps", *ALONE, *CUDA)
    install(*WITH_DEPENDENCIES)
    site = pathlib.Path(output(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    target = site / "nvidia" / "cu13" / "lib"
    target.mkdir(parents=True, exist_ok=True)
    for name, versions in missing_libraries(site):
        build(name, versions, target)
    check = "import torch, transformers, peft; x = torch.ones(2, 2, requires_grad=True); (x @ x).sum().backward()"
    subprocess.run([python, "-c", check], check=True)
    done.touch()


if __name__ == "__main__":
    main(*sys.argv[1:])
