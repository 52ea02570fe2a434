# ruff: noqa
#: case set and not known
import os

os.environ["VLLM_USE_V1"] = "1"  # expect: BP601
os.environ.setdefault("VLLM_ATTENTION_BACKENDS", "X")  # expect: BP601

#: case set and known
import os

os.environ["VLLM_PLUGINS"] = "plug"
os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
os.environ["VLLM_LOGGING_LEVEL"] = "DEBUG"
os.environ["PLUG_ANYTHING"] = "1"

#: case read from vllm.envs and gone
import vllm.envs as envs


def directory():
    return envs.VLLM_TORCH_PROFILER_DIRECTORY  # expect: BP601


#: case imported from vllm.envs and gone
from vllm.envs import VLLM_USE_V1  # expect: BP102

#: case the plugin's own variable
import os

DEBUG = os.getenv("VLLM_PLUG_DEBUG", "0")  # expect: BP601 note

#: case table of the plugin's own variables, set elsewhere
import os


def flag(name):
    return bool(int(os.environ.get(name, "0")))


TABLE = {
    "VLLM_PLUG_FAST": lambda: flag("VLLM_PLUG_FAST"),
}


def prepare():
    os.environ["VLLM_PLUG_FAST"] = "1"  # expect: BP601 note


#: case declared to vLLM
import os

import vllm.envs

vllm.envs.environment_variables["VLLM_PLUG_MODE"] = lambda: os.getenv("VLLM_PLUG_MODE")

#: case declared to vLLM from a table
import os

import vllm.envs

MINE = {
    "VLLM_PLUG_A": lambda: os.getenv("VLLM_PLUG_A"),
    "VLLM_PLUG_B": lambda: os.getenv("VLLM_PLUG_B"),
}
vllm.envs.environment_variables.update(MINE)


#: case set for a test
def test_it(monkeypatch):
    monkeypatch.setenv("VLLM_USE_V1", "1")  # expect: BP601
    monkeypatch.setenv("VLLM_PLUGINS", "plug")


#: case set for another process
import os
import subprocess

env = os.environ.copy()
env["VLLM_USE_V1"] = "0"  # expect: BP601
subprocess.run(["true"], env=env)

#: case environment updated at once
import os

os.environ.update({"VLLM_USE_V1": "1", "VLLM_PLUGINS": ""})  # expect: BP601

#: case names that only begin alike
import os

VLLM_CONSTANT = 3
NAME = "VLLM_USE_V1"
os.environ["XVLLM_THING"] = "1"
value = {"VLLM_NOT_A_VARIABLE": 3}

#: case assigned in vllm.envs
import vllm.envs as envs

envs.VLLM_PLUGINS = ["plug"]
envs.VLLM_USE_V1 = True  # expect: BP601

#: case named by a constant in vLLM
import os

IS_SET = "VLLM_OMP_NUM_THREADS_SET_BY_VLLM" in os.environ
os.environ["VLLM_OMP_NUM_THREADS_SET_BY_PLUG"] = "1"  # expect: BP601

#: case declared to vLLM by a name of another module
import os

from vllm import envs

from plug.names import VARIABLE

envs.environment_variables[VARIABLE] = lambda: os.environ.get(VARIABLE)
os.environ["VLLM_PLUG_MOOD"] = "1"  # expect: BP601
#: file names.py
import os

VARIABLE = "VLLM_PLUG_MODE"


def mode():
    return os.environ.get(VARIABLE)
